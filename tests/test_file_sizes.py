"""A file is one concept, short enough to be read in one sitting."""

import re
from pathlib import Path

from support import sources
from support.sources import text, together

from tests.support.command import REPOSITORY as REPO

pytestmark = together
LONGEST_FILE = 600  # lines


def modules() -> list[Path]:
    return [path.relative_to(REPO) for path in sources.modules()]


def test_test_files_are_named_for_what_they_test() -> None:
    ticket = re.compile(r"test_[a-z]\d+[a-z]?_")
    files = (path for path in (REPO / "tests").rglob("test_*.py") if ticket.match(path.name))
    assert [str(path.relative_to(REPO)) for path in files] == []


def test_no_file_is_longer_than_one_sitting() -> None:
    lengths = {str(m): len(text(REPO / m).splitlines()) for m in modules()}
    assert [name for name, lines in lengths.items() if lines > LONGEST_FILE] == []
