"""What a module says that it never does, a test holds."""

from __future__ import annotations

import re

from support import sources

from tests.support.command import REPOSITORY

HELD = {
    "pickle": "tests/faults/test_40_pickles.py",
    "redirect": "tests/olm_train/extensions/notices/test_sender.py",
}
"""Words of such a clause, and the test."""


def test_each_clause_has_its_test() -> None:
    without = []
    for path in sources.modules():
        for clause in re.findall(r"Never:\s(.*?)(?:\.\s|\"\"\")", sources.text(path), re.DOTALL):
            if not any(word in clause for word in HELD):
                without.append(f"{path.relative_to(REPOSITORY)}: {clause}")
    assert without == []
    assert [test for test in HELD.values() if not (REPOSITORY / test).is_file()] == []
