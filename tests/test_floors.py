"""The floors of both packages: a module imports from its own room and from floors below it.

The table is the architecture; `docs/explanation/architecture.md` draws it. Imports inside functions
and under TYPE_CHECKING count as any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support import sources

pytestmark = sources.together

FLOORS = {
    "olm_data": (
        ("redaction", "process_lock"),
        ("errors",),
        (
            "regular_files",
            "streams",
            "counts",
            "sinks",
            "extras",
            "pace",
            "threads",
            "decoding",
            "decompress",
        ),
        ("plugins",),
        ("kinds",),
        ("bounded_json", "canonical", "arrow_values", "config", "user_cache", "parquet"),
        ("progress", "printing", "loopback"),
        ("storage",),
        ("page",),
        ("model_folder", "model_receipt"),
        ("order",),
        ("run_log",),
        ("select",),
        ("tokenizer",),
        ("dataset",),
        ("target", "packing"),
        ("sources",),
        ("encoders", "train_tokenizer"),
        ("runners",),
        ("mixture",),
        ("rows",),
        ("tokenization",),
        ("verify", "show"),
        ("command",),
        ("commands",),
        ("verbs", "cli"),
        ("__main__",),
        ("extensions",),
    ),
    "olm_train": (
        ("distributed", "model"),
        ("data", "metrics"),
        ("stability", "duration", "stop"),
        ("evaluation", "optim", "parallel"),
        ("train_module_base", "train_module_config", "loss_context"),
        ("estimate", "gradient_step"),
        ("train_module", "basic_train_module", "checkpoint"),
        ("generate",),
        ("callbacks",),
        ("trainer",),
        ("run",),
        ("presets",),
        ("cli",),
        ("__main__",),
        ("extensions",),
    ),
}
"""Rooms from the ground up: those of one floor do not import each other."""

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
        placed = [name for floor in floors for name in floor]
        there = {room(module) for module in imports if module.startswith(f"{package}.")}
        assert sorted(placed) == sorted(there), package


def test_no_import_goes_up(imports: Graph) -> None:
    height = {
        f"{package}.{name}": number
        for package, floors in FLOORS.items()
        for number, floor in enumerate(floors)
        for name in floor
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
