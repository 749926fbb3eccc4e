"""The floors of both packages: a module imports from its own room and from rooms below it.

The table is the architecture; `docs/explanation/architecture.md` draws it. A floor has steps where
one of its rooms stands on another. Imports inside functions and under TYPE_CHECKING count as any
other.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import pytest
from support import sources

pytestmark = sources.together

FLOORS: Mapping[str, Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "olm_data": {
        "values": (
            (
                "arrow_values",
                "chat_template_child",
                "decompress",
                "parquet",
                "process_lock",
                "redaction",
                "threads",
                "user_cache",
            ),
            ("decoding", "errors"),
            ("counts", "extras", "loopback", "regular_files", "sinks"),
            ("bounded_json", "chat_template", "path_kinds", "plugins", "printing", "progress"),
        ),
        "ground": (("config", "storage", "model_receipt"), ("model_folder", "page")),
        "rules": (("order", "tokenizer"), ("select", "run_log")),
        "formats": (("dataset",),),
        "parts": (("sources", "encoders", "packing", "runners"),),
        "work": (("tokenization", "mixture"), ("rows",)),
        "door": (("command",), ("commands",), ("verbs", "cli"), ("__main__",)),
        "beside": (("extensions",),),
    },
    "olm_train": {
        "ground": (("distributed", "model"),),
        "rules": (("data", "metrics"), ("parallel", "duration", "stability"), ("optim",)),
        "step": (
            ("train_module_base", "train_module_config", "loss_context", "expert_balance"),
            ("estimate", "gradient_step"),
            ("train_module",),
        ),
        "formats": (("checkpoint",),),
        "parts": (("evaluation",), ("callbacks",)),
        "work": (("trainer",),),
        "door": (("run",), ("cli",), ("__main__", "generate")),
        "beside": (("extensions",),),
    },
}
"""By package and floor, from the ground up: steps, of which the rooms do not import each other."""

Graph = Mapping[str, set[str]]


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    for path in sources.modules(package.name):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


@pytest.fixture(scope="module")
def imports(repository: Path) -> Graph:
    """Each module, and the modules of both packages that it names in an import."""
    files = dict(pair for name in FLOORS for pair in modules(repository / name))
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(sources.tree(path)):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names if alias.name in files}
            elif isinstance(node, ast.ImportFrom) and node.module in files:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= inner & set(files) or {node.module}
        graph[name] -= {name}
    return graph


def room(module: str) -> str:
    """`olm_data.storage.store` -> `storage`."""
    return module.split(".")[1]


def test_every_room_has_a_floor(imports: Graph) -> None:
    for package, floors in FLOORS.items():
        placed = [name for steps in floors.values() for step in steps for name in step]
        there = {room(module) for module in imports if module.startswith(f"{package}.")}
        assert sorted(placed) == sorted(there), package


def test_the_page_draws_the_floors(repository: Path) -> None:
    page = (repository / "docs/explanation/architecture.md").read_text()
    table = page.partition("## Floors")[2].partition("## Extensions")[0]
    rows = re.findall(r"^\| (?:\d )?(\w+) \|(.*)\|(.*)\|$", table, re.MULTILINE)
    for floor, *cells in rows[1:]:
        for (package, floors), cell in zip(FLOORS.items(), cells, strict=True):
            rooms = {*chain(*floors.get(floor, ()))} - {"__main__"}
            drawn = set(re.findall(r"`(\w+)/?`", cell))
            assert drawn <= rooms if floor == "values" else drawn == rooms, (package, floor)
    assert {floor for floor, *_ in rows[1:]} == {*chain(*FLOORS.values())}


def test_no_import_goes_up(imports: Graph) -> None:
    height = {
        f"{package}.{name}": number
        for package, floors in FLOORS.items()
        for number, step in enumerate(chain.from_iterable(floors.values()))
        for name in step
    }
    up = set()
    for module, named in imports.items():
        if module.endswith(".__main__"):  # how a room is started: nothing imports it
            continue
        for other in named:
            a, b = (".".join(name.split(".")[:2]) for name in (module, other))
            if a == b or a not in height or b not in height or a.split(".")[0] != b.split(".")[0]:
                continue
            if height[b] >= height[a]:
                up.add((module, other))
    assert not up


def test_no_modules_import_each_other_in_a_circle(imports: Graph) -> None:
    assert not set(circles(imports))


def circles(graph: Graph) -> Iterator[frozenset[str]]:
    """Strongly connected components of more than one module (Tarjan 1972, without recursion)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    for root in graph:
        if root in number:
            continue
        number[root] = low[root] = len(number)
        path.append(root)
        work = [(root, iter(sorted(graph[root])))]
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in number:
                    number[other] = low[other] = len(number)
                    path.append(other)
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in path:
                    low[node] = min(low[node], number[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    members = path[path.index(node) :]
                    del path[path.index(node) :]
                    if len(members) > 1:
                        yield frozenset(members)


def test_no_two_classes_have_one_name() -> None:
    """Private ones aside: they are read beside what uses them."""
    classes = (node for path in sources.modules() for node in ast.walk(sources.tree(path)))
    names = Counter(node.name for node in classes if isinstance(node, ast.ClassDef))
    assert not [name for name, times in names.items() if times > 1 and not name.startswith("_")]
