"""The table of faults in the repository lists exactly the tests there are."""

from __future__ import annotations

from pathlib import Path

from faults.report import TABLE, functions_by_row, results_by_row, row_lines, rows_of, table
from faults.rows import ROWS


def test_the_committed_table_lists_the_tests_there_are(repository: Path) -> None:
    assert repository / "FAULTS.md" == TABLE
    committed = [line for line in TABLE.read_text().splitlines() if line[2:3].isdigit()]
    found = {int(line.split(" ")[1]): line.rpartition("|")[0] for line in committed}
    wanted = row_lines()
    stale = [n for n in wanted if not found.get(n, "").startswith(wanted[n])]
    assert stale == [], "run: python tests/faults/report.py"
    assert len(found) == len(committed) == len(wanted)


def test_every_test_is_for_a_row_and_every_row_has_a_test_or_a_reason() -> None:
    tests = functions_by_row()
    assert set(tests) <= set(ROWS)
    for number, row in ROWS.items():
        assert bool(tests[number]) != bool(row.missing), number


def test_a_test_belongs_to_the_rows_of_its_own_name_before_its_files() -> None:
    assert rows_of("test_29_damaged.py", "test_34_an_id") == [34]
    assert rows_of("test_04_full.py", "test_04_05_an_error") == [4, 5]
    assert rows_of("test_24_bombs.py", "test_a_bomb[x]") == [24]


def test_results_are_counted_by_row() -> None:
    outcomes = {
        "tests/faults/test_19_24_70_bombs.py::test_a_bomb[1]": "passed",
        "tests/faults/test_19_24_70_bombs.py::test_a_bomb[2]": "failed",
        "tests/faults/test_03_04_05_failing_disk.py::test_04_05_x": "passed",
    }
    text = table(results_by_row(outcomes)).splitlines()
    (bombs,) = [line for line in text if line.startswith("| 24 |")]
    assert bombs.endswith("| 1 failed, 1 passed |")
    for row in (4, 5):
        (line,) = [line for line in text if line.startswith(f"| {row} |")]
        assert line.endswith("| 1 passed |")
