"""Tests lie where their module lies, and a file stays short enough to be read in one sitting."""

import ast
import re
from pathlib import Path

from support import sources
from support.sources import text, together, tree

from tests.support.command import REPOSITORY as REPO

pytestmark = together
LONGEST_FILE = 400  # lines
SMALL_MODULE = 40  # lines of code; what is shorter is tested where it is used


def modules() -> list[Path]:
    return [path.relative_to(REPO) for path in sources.modules()]


def lines_of_code(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(tree(path)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text(path).splitlines(), 1)
    code = {number for number, line in lines if line.strip() and not line.lstrip().startswith("#")}
    return len(code - docstrings)


def mirrored(module: Path) -> Path:
    return REPO / "tests" / module.parent / f"test_{module.name.lstrip('_')}"


def test_each_module_has_its_tests_at_the_mirrored_path() -> None:
    large = [m for m in modules() if lines_of_code(REPO / m) > SMALL_MODULE]
    named = [m for m in large if m.name not in ("__init__.py", "__main__.py")]
    assert [str(m) for m in named if not mirrored(m).exists()] == []


def test_test_files_are_named_for_what_they_test() -> None:
    ticket = re.compile(r"test_[a-z]\d+[a-z]?_")
    files = (path for path in (REPO / "tests").rglob("test_*.py") if ticket.match(path.name))
    assert [str(path.relative_to(REPO)) for path in files] == []


def test_no_file_is_longer_than_one_sitting() -> None:
    lengths = {str(m): len(text(REPO / m).splitlines()) for m in modules()}
    assert [name for name, lines in lengths.items() if lines > LONGEST_FILE] == []
