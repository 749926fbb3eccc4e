"""The modules of the packages, each read and parsed once in a process.

Tests that walk them all belong to the group `sources`: one worker reads, for all of them.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("olm_data", "olm_train")

together = pytest.mark.xdist_group("sources")


@cache
def modules(package: str | None = None) -> tuple[Path, ...]:
    """Return the files of a package, or of both, sorted."""
    names = PACKAGES if package is None else (package,)
    return tuple(sorted(path for name in names for path in (REPOSITORY / name).rglob("*.py")))


@cache
def text(path: Path) -> str:
    """Return what stands in a file."""
    return path.read_text()


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file; nobody changes it."""
    return ast.parse(text(path))
