"""JSON records: odd ones are explained, their neighbours kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inputs import lines
from support.reading import read_source


def test_a_bad_record_that_the_condition_leaves_out_is_not_called_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "one", "n": 1}\n{broken\n{"text": 3, "n": 1}\n{"text": 3, "n": 0}\n'
        b'{"text": "\xff", "n": 0}\n{"text": "\xff", "n": 1}\n{"n": 0}\n{"text": "two", "n": "1"}\n'
    )
    read = read_source(path, where="n == 1")
    assert read.texts == ["one"]
    assert [reason for reason, _ in read.reasons] == ["malformed", "no_text", "invalid_utf8"]
    assert read.skipped == {"filtered": 4}


ODD_LINES = {
    b'{"text": "cut': "malformed",
    b"not json": "malformed",
    b"[1, 2]": "malformed",
    b'"text"': "malformed",
    b'{"text": "two"} {"text": "objects"}': "malformed",
    b'{"text": "raw\ttab"}': "malformed",
    b"[" * 100_000: "malformed",
    b'{"text": "one", "text": "other"}': "malformed",
    b'{"text": "one", "te\\u0078t": "written otherwise", "text" : null}': "malformed",
    b'{"text": "one \xff", "text": "other"}': "malformed",
    b'{"text": "one", "n": {"text": "inner"}, "text": "other"}': "malformed",
    b'{"id": "no text"}': "no_text",
    b'{"text": null}': "no_text",
    b'{"text": 7}': "no_text",
    b'{"text": ["a"]}': "no_text",
    b'{"text": "\xff\xfe"}': "invalid_utf8",
    b'{"text": "\xed\xa0\x80"}': "invalid_utf8",
    b'{"text": "\xc0\xaf"}': "invalid_utf8",
    b'{"text": "lone \\ud800 surrogate"}': "invalid_utf8",
    b'{"text": ""}': "empty",
    b'{"text": " \\n\\t\\u00a0\\u3000"}': "empty",
}


@pytest.mark.parametrize(("line", "reason"), ODD_LINES.items(), ids=lambda v: str(v)[:30])
def test_an_odd_line_is_dropped_with_its_reason_and_place_and_its_neighbours_are_kept(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    read = read_source(path)
    assert (read.texts, read.reasons) == (["before", "after"], [(reason, 19)])
    assert all(drop.detail.isprintable() for drop in read.drops)


def test_bad_metadata_does_not_cost_a_good_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "a", "meta": "\xff"}\n{"text": "b", "meta": NaN}\n'
        b'{"text": "c", "meta": "\\ud800"}\n{"text": "d", "id": "\\ud800"}\n'
    )
    read = read_source(path)
    assert (read.texts, read.ids) == (["a", "b", "c", "d"], [None, None, None, "\\ud800"])


def test_objects_that_go_on_over_lines_are_not_taken_for_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":\n"a"}{"text":"b"}\n{"text":"c"}\n')
    read = read_source(path)
    assert read.texts == ["c"]
    assert [reason for reason, _ in read.reasons] == ["malformed", "malformed"]


def test_ids_of_any_json_type_become_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"text": "a", "id": i} for i in ("x", 7, None, [1, "\u00e9"], 1.5)]))
    assert read_source(path).ids == ["x", "7", None, '[1,"\u00e9"]', "1.5"]


def test_a_name_that_stands_twice_elsewhere_is_no_second_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"kind": "text", "text": "text"}\n{"text": "b", "meta": {"text": "c", "text": "d"}}\n'
        b'{"text": "c", "a\\"text": "text"}\n{"te\\u0078t": "d"}\n'
    )
    assert read_source(path).texts == ["text", "b", "c", "d"]
