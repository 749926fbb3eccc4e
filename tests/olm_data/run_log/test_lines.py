"""Lines of a log come out as they went in; one that is torn goes, one that is no line is told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.full_disk import files_of_at_most

from olm_data.errors import ValidationError
from olm_data.run_log import lines as module
from olm_data.run_log.lines import append_line, lines, read_lines, replace_file


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    number: int


def test_what_is_appended_is_read_and_a_torn_line_goes(tmp_path: Path) -> None:
    path, notes = tmp_path / "log.jsonl", list[str]()
    assert read_lines(path, Entry) == []
    append_line(path, b'{"number":1}')
    with open(path, "ab") as file:
        file.write(b'{"num')
    assert read_lines(path, Entry, notes) == [Entry(1)]
    assert len(notes) == 1
    append_line(path, b'{"number":2}')
    assert read_lines(path, Entry) == [Entry(1), Entry(2)]
    assert path.read_bytes() == b'{"number":1}\n{"number":2}\n'


def test_a_line_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, b'{"number":1}')
    append_line(path, b'{"other":2}')
    with pytest.raises(ValidationError, match="malformed") as caught:
        read_lines(path, Entry)
    assert "line 2" in str(caught.value)


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"x" * 100)
    monkeypatch.setattr(module, "MAX_LINE", 50)
    with pytest.raises(ValidationError, match="longer than 50 bytes"):
        list(lines(path))


def test_a_full_disk_keeps_the_old_file_and_no_part_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    replace_file(path, b"old")
    with pytest.raises(OSError, match="too large"), files_of_at_most(5):
        replace_file(path, b"123456789")
    assert [each.name for each in tmp_path.iterdir()] == ["log.jsonl"]
    assert path.read_bytes() == b"old"
