"""JSON arrays: read as the same lines are, refused where they are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inputs import lines, write
from support.reading import read_source, resolve_source

from olm_data.errors import InputError

QUICK = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[],\u4f60', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab]", max_size=3), inner),
    max_leaves=6,
)


@QUICK
@given(
    rows=st.lists(st.fixed_dictionaries({"text": st.text('ab"\\', max_size=9), "x": VALUES})),
    indent=st.none() | st.integers(0, 2),
    chunk=st.sampled_from([1, 2, 7, 1 << 20]),
)
def test_a_json_array_is_read_as_the_same_json_lines(
    tmp_path: Path, rows: list[Any], indent: int | None, chunk: int
) -> None:
    import olm_data.extensions.tables.json_array as module

    kept, module._CHUNK = module._CHUNK, chunk
    try:
        array = read_source(write(tmp_path / "a.json", json.dumps(rows, indent=indent).encode()))
    finally:
        module._CHUNK = kept
    same = read_source(write(tmp_path / "b.jsonl", lines(rows)))
    assert (array.texts, len(array.drops)) == (same.texts, len(same.drops))
    assert [rows[place]["text"] for _, place in array.places] == array.texts


def test_elements_that_are_no_records_are_counted_with_their_bytes(tmp_path: Path) -> None:
    content = b'[{"text": "one"}, 3, "x", {"text": null}, [1], {"text": oops}, {"text": "two"}]\n'
    read = read_source(write(tmp_path / "a.json", content))
    assert (read.texts, read.places) == (["one", "two"], [("a.json", 0), ("a.json", 6)])
    kinds = ["malformed", "malformed", "no_text", "malformed", "malformed"]
    assert read.reasons == list(zip(kinds, range(1, 6), strict=True))
    assert read.drops[4].raw == b'{"text": oops}'


@pytest.mark.parametrize(
    "content",
    [
        b'[{"text": "x"}',
        b"[",
        b'[{"text": "x',
        b'[{"text": "x"},]',
        b'[,{"text": "x"}]',
        b'[{"text": "x"}] {"text": "lost"}',
        b'[{"text": "x"}}',
        b'[{"text": "x"}]]',
    ],
)
def test_what_is_no_array_is_refused_and_nothing_of_it_is_lost(
    tmp_path: Path, content: bytes
) -> None:
    path = write(tmp_path / "a.json", content)
    with pytest.raises(InputError, match="array"):
        read_source(path)


def test_a_json_file_of_lines_stays_json_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", lines([{"text": "one"}, {"text": "two"}]))
    (file,) = resolve_source([str(path)]).inputs
    assert (file.format, file.position) == ("jsonl", "byte")
    assert read_source(path).texts == ["one", "two"]
