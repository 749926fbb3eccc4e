"""Writes docs/reference/api/: signatures and docstrings of the public names of both packages.

    python docs/api.py

__init__.pyi -> where each name is defined -> its source, parsed and never imported -> one page each
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("olm_data", "olm_train")
Named = ast.ClassDef | ast.FunctionDef


def public(package: str) -> Iterator[tuple[str, str]]:
    """Yield each public name and the module that it comes from."""
    for node in ast.parse((ROOT / package / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.name, node.module) for alias in node.names)


def definition(name: str, module: str) -> Named:
    """Return where a name is defined, through modules that hand it on."""
    place = ROOT / module.replace(".", "/")
    file = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, Named) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return definition(name, str(node.module))
    raise LookupError(f"{module} does not define {name}")


def signature(node: Named) -> str:
    """Return the line that a name is called by."""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        decorators = {ast.unparse(one) for one in node.decorator_list}
        if decorators & {"property", "cached_property"}:
            return f"{node.name}{returns}"
        given = ast.unparse(node.args).removeprefix("self").removeprefix("cls").removeprefix(", ")
        return f"{node.name}({given}){returns}"
    starts = [
        one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
    ]
    if starts:
        return f"class {node.name}({ast.unparse(starts[0].args).removeprefix('self, ')})"
    fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
    return "\n    ".join([f"class {node.name}:", *fields]) if fields else f"class {node.name}"


def members(node: Named) -> Iterator[ast.FunctionDef]:
    """Yield the public methods and properties of a class that say what they do."""
    for one in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(one, ast.FunctionDef) and one.name[0] != "_" and ast.get_docstring(one):
            yield one


def text_of(node: Named) -> str:
    """Return signature and docstring as a block that shows them as they are."""
    folded = []
    for line in signature(node).splitlines():  # after a comma
        indent = line[: -len(line.lstrip())]
        held = re.sub("(?<!,) ", "\xa0", line.strip())
        folded.append(textwrap.fill(indent + held, 88, subsequent_indent=f"{indent}    "))
    called = "\n".join(folded).replace("\xa0", " ")
    return f"```\n{called}\n\n{ast.get_docstring(node) or ''}".rstrip() + "\n```\n"


def page(package: str) -> str:
    """Return the page of a package."""
    found = sorted(public(package))
    parts = [
        f"# Names of `import {package}`\n\nMade of the docstrings by `python docs/api.py`; do not "
        "edit. Other names of the modules may change\nwithout notice.\n"
    ]
    for name, module in found:
        node = definition(name, module)
        parts.append(f"## {name}\n\nof `{module}`\n\n{text_of(node)}")
        parts += [f"### {name}.{one.name}\n\n{text_of(one)}" for one in members(node)]
    return "\n".join(parts)


def main() -> None:
    """Write the pages."""
    for package in PACKAGES:
        (ROOT / "docs" / "reference" / "api" / f"{package}.md").write_text(page(package))


if __name__ == "__main__":
    main()
