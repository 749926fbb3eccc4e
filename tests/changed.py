"""Runs the tests that what has changed can reach: `python tests/changed.py --since main -n 2`.

A file reaches what it imports, in functions too, and what its strings name: modules by their dotted
names, files by their names or that of their folder, `*.py` all modules. Of a `conftest.py` a test
reaches what it has the name of, so that one fixture is not all of them.

What a program looks up (commands, callbacks, services and other entry points) tests and pages reach
where its name is a parameter, or stands first in a string, after `olm-data`, before a colon or
between dots: a test that starts `olm-data tokenize` as a process reaches that command. In the
packages it is a whole string of a module that imports `plugins` or starts a process.

A changed page, schema, template or pyproject.toml also runs all of `tests/docs`; a conftest what is
below it; versions of packages, and a file that nothing reaches, run everything.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from importlib import import_module
from pathlib import PurePath

from support.sources import PACKAGES, REPOSITORY

sys.path[:0] = [str(REPOSITORY)]
WORDS = re.compile(
    r"(?:^|(?<=olm-data )|(?<=olm-train ))[\w-]+(?![\w./-])|[\w-]+(?=:)|[\w*/-]*[./][\w.*/-]+"
)
LOOKED_UP = ("commands", "callbacks", "services", "runners", "names")
"""Entry points of which a program takes those that are named; of other groups it takes all."""
TO_DOCS = re.compile(r"\.md$|schema\.json$|^pyproject\.toml$|/templates/")
TO_ALL = re.compile(r"^(requirements/|constraints\.txt)")


class Graph:
    """What reaches what: paths in the repository, and `path::name` for the parts of a conftest."""

    def __init__(self, gone: Collection[str] = ()) -> None:
        self.files = {*git("ls-files", "--cached", "--others", "--exclude-standard"), *gone}
        self.tests = {name for name in self.files if re.search(r"^tests/.*\btest_\w+\.py$", name)}
        python = [name.removeprefix("tests/") for name in self.files if name.endswith(".py")]
        self._roots = {name.removesuffix(".py").split("/")[0] for name in python}
        self._named = _names(self.files)
        self._reached_from: defaultdict[str, set[str]] = defaultdict(set)
        for node, other in (edge for name in self.files for edge in self._edges(name)):
            self._reached_from[other].add(node)

    def reaching(self, changed: Iterable[str]) -> set[str]:
        """Return the test files that reach one of these files."""
        found = set(changed)
        for name in changed:
            if TO_ALL.search(name) or not (self._reached_from[name] or name.startswith("tests/")):
                return self.tests
            found |= self._below("tests/docs/") if TO_DOCS.search(name) else set()
            found |= self._below(name.removesuffix("conftest.py")) - {name}
        left = list(found)
        while left:
            new = self._reached_from[left.pop()] - found
            found |= new
            left += new
        return found & self.tests

    def _below(self, folder: str) -> set[str]:
        return {name for name in self.tests if name.startswith(folder)}

    def _edges(self, name: str) -> Iterator[tuple[str, str]]:
        path, folder = REPOSITORY / name, f"{PurePath(name).parent}/"
        if path.suffix == ".py" and path.exists():
            tree = ast.parse(path.read_text())
            if path.name != "conftest.py":
                yield from ((name, other) for other in self._of(tree, name))
                return
            for stmt in (each for each in tree.body if not isinstance(each, ast.If)):
                node = f"{name}::{getattr(stmt, 'name', '')}"
                yield from ((node, other) for other in {*self._of(stmt, name), f"{name}::"})
                if "autouse" in "".join(map(ast.unparse, getattr(stmt, "decorator_list", ()))):
                    yield from ((test, node) for test in self._below(folder))
        elif name.startswith(("docs/", "pipelines/")) and path.exists():
            lines = path.read_text(errors="replace").splitlines()
            named = self._named_in(lines)
            yield from ((name, other) for other in named if other.endswith(".py"))

    def _of(self, tree: ast.AST, name: str) -> set[str]:
        """Return what a file, or a statement of it, reaches at once."""
        nodes, ours = list(ast.walk(tree)), name.startswith(PACKAGES)
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        words, dotted, ids = set[str](), set[str](), set[str]()
        for node in nodes:
            match node:
                case ast.Import():
                    dotted |= {alias.name for alias in node.names}
                case ast.ImportFrom(module=str(module)):
                    dotted |= {f"{module}.{alias.name}" for alias in node.names}
                case ast.Attribute(value=ast.Name(id=package), attr=attribute):
                    dotted.add(f"{package}.{attribute}")
                case ast.Constant(value=str(value)) if id(node) not in docs:
                    words.add(value)
                case ast.keyword(arg=str(word)) if not ours:
                    words.add(word)
                case ast.arg(arg=word) | ast.Name(id=word):
                    ids.add(word)
        if ours:
            looks_up = "olm_data.plugins" in dotted or "-m" in words
            words = {word for word in words if looks_up or "." in word}
            words = set() if PurePath(name).name in ("__init__.py", "cli.py") else words
        found = self._named_in(words, whole=ours).union(*map(self._module, dotted)) - {name}
        if ours:
            return {each for each in found if each.startswith(PACKAGES)}
        folders = PurePath(name).parents
        return found | {
            f"{each}/conftest.py::{word}" for each in folders for word in (words | ids) - {""}
        }

    def _named_in(self, texts: Iterable[str], whole: bool = False) -> set[str]:
        found = set[str]()
        for text in texts:
            for word in WORDS.findall(text) + re.findall(r"callbacks\.([\w-]+)", text):
                modules = self._module(word)
                parts = () if modules or whole else {word, *re.findall(r"[^/]+\.\w+$", word)}
                found |= modules.union(*(self._named.get(part, ()) for part in parts))
            found |= self._named.get(text, set())
        return found

    def _module(self, dotted: str) -> set[str]:
        """Return the file of the longest part of a name that is a module, and its packages'."""
        parts = dotted.split(".")
        if parts[0] not in self._roots:
            return set()
        heads = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        known = [each for head in heads if (each := self._named.get(head))]
        inits = {one for each in known for one in each if one.endswith("/__init__.py")}
        return inits.union(*known[:1])


def _names(files: Collection[str]) -> dict[str, set[str]]:
    """Return by a name the files that it is of."""
    named: defaultdict[str, set[str]] = defaultdict(set)
    for name in files:
        path, ours = PurePath(name), name.startswith(PACKAGES)
        module = name.removeprefix("tests/").removesuffix(".py").removesuffix("/__init__")
        python = {name, module.replace("/", "."), "*.py" if ours else path.name}
        other = {name, path.name, path.parent.name, f"*{path.suffix or path.name}"}
        command = {path.stem.replace("_", "-")} if "/commands/" in name else set()
        for word in command | (python if path.suffix == ".py" else other):
            named[word].add(name)
    for package in PACKAGES:
        for name, home in import_module(package)._HOMES.items():
            named[f"{package}.{name}"] = named[home]
    for section in (REPOSITORY / "pyproject.toml").read_text().split("[project.entry-points.")[1:]:
        group = section.split('"')[1]
        for name, module in re.findall(r'^([\w-]+) = "(olm_[\w.]+):', section, re.M):
            whole = group.rpartition(".")[2] not in LOOKED_UP
            for word in (group if whole else name, f"{group.partition('.')[0]}.{name}"):
                named[word] |= named[module] | named[module.rpartition(".")[0]]
    del named[""]  # the folder of those at the top
    return named


def git(*words: str) -> list[str]:
    """Return the lines that git says of this repository."""
    return subprocess.check_output(["git", *words], cwd=REPOSITORY, text=True).splitlines()


def main() -> int:
    """Run pytest with what is reached; further options are pytest's."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--since", help="a revision of git; origin/main, or HEAD without one")
    options, words = parser.parse_known_args()
    there = git("for-each-ref", "refs/remotes/origin/main")
    since = options.since or ("origin/main" if there else "HEAD")
    changed = git("diff", "--name-only", "--no-renames", "--merge-base", since)
    changed += git("ls-files", "--others", "--exclude-standard")
    graph = Graph(changed)
    chosen = sorted(name for name in graph.reaching(changed) if (REPOSITORY / name).exists())
    print(f"{len(chosen)} of {len(graph.tests)} test files reach what changed", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", *words, *chosen]) if chosen else 0


if __name__ == "__main__":
    sys.exit(main())
