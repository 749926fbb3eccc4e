"""How a run ended is a line each time, read back as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import ValidationError
from olm_data.run_log.log import End, append_end, read_ends

STOPPED = End(step=4, time=1000.5, reason="stopped", by="SIGTERM")
CANCELLED = End(step=9, time=2000.25, reason="cancelled", by="stop file", why="<b> too slow")


def test_the_file_is_this(tmp_path: Path) -> None:
    append_end(tmp_path, STOPPED)
    append_end(tmp_path, CANCELLED)
    assert (tmp_path / "ends.jsonl").read_text() == (
        '{"step":4,"time":1000.5,"reason":"stopped","by":"SIGTERM"}\n'
        '{"step":9,"time":2000.25,"reason":"cancelled","by":"stop file","why":"<b> too slow"}\n'
    )
    assert read_ends(tmp_path) == [STOPPED, CANCELLED]


def test_a_run_without_ends_has_none(tmp_path: Path) -> None:
    assert read_ends(tmp_path) == []


def test_a_line_that_is_cut_off_is_told_and_goes_with_the_next(tmp_path: Path) -> None:
    append_end(tmp_path, STOPPED)
    with (tmp_path / "ends.jsonl").open("a") as file:
        file.write('{"step": 9, "re')
    notes: list[str] = []
    assert read_ends(tmp_path, notes) == [STOPPED]
    assert "cut off after 15 bytes" in notes[0]
    append_end(tmp_path, CANCELLED)
    assert read_ends(tmp_path) == [STOPPED, CANCELLED]


@pytest.mark.parametrize(
    "line", ['{"step": 1, "reason": "bored"}', '{"step": -1, "reason": "failed"}', "[]", "{"]
)
def test_a_line_that_no_run_writes_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "ends.jsonl").write_text(line + "\n")
    with pytest.raises(ValidationError, match="malformed"):
        read_ends(tmp_path)
