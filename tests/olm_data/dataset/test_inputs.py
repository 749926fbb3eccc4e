"""Inputs, units and reading options: what is digested, and what stays as it was asked."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from olm_data.dataset.inputs import KEEP_TYPES, InputFile, ReadOptions, RecordOptions, Unit


def test_a_unit_is_a_list_of_four_numbers_in_a_plan() -> None:
    unit = Unit(input=3, start=10, stop=20, bytes=10)
    assert msgspec.json.encode(unit) == b"[3,10,20,10]"
    assert msgspec.json.decode(b"[3,10,20,10]", type=Unit) == unit
    assert pickle.loads(pickle.dumps(unit)) == unit
    for wrong in (b"[3,10,20]", b"[3,10,20,-1]", b'{"input":3}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=Unit)


def test_a_field_that_no_release_wrote_is_refused() -> None:
    value = {"path": "a", "url": "/a", "bytes": 1, "revision": "r", "format": "txt"}
    assert msgspec.convert({**value, "position": "byte"}, InputFile).until is None
    for more in ({"position": "page"}, {"position": "byte", "more": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**value, **more}, InputFile)


def test_what_changes_no_byte_is_not_in_what_is_recorded() -> None:
    stops = RecordOptions(on_invalid="error")
    assert stops.recorded.on_invalid == "skip"
    assert RecordOptions(on_invalid="replace").recorded.on_invalid == "replace"
    assert RecordOptions(seed=7).seed is None  # nothing is drawn
    assert RecordOptions(sample="1/2").seed == 0
    assert RecordOptions(sample="1/2", seed=7).seed == 7


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, {"text_column": "text", "id_column": None, "keep": [], "separator": None}),
        ({"on_invalid": "skip", "on_unknown": "keep"}, {}),
        ({"delimiter": "|"}, {"delimiter": "|"}),
        ({"where": "a == 1"}, {"where": "a == 1"}),
    ],
)
def test_old_fields_are_always_written_and_newer_ones_where_they_say_something(
    options: dict[str, Any], stored: dict[str, Any]
) -> None:
    plain = msgspec.to_builtins(RecordOptions(**options))
    always = {"text_column": "text", "id_column": None, "keep": [], "separator": None}
    assert {**plain, "keep": list(plain["keep"])} == {**always, **stored}
    assert msgspec.convert(plain, RecordOptions) == RecordOptions(**options)


def test_kept_columns_have_the_types_that_arrow_names() -> None:
    keep = tuple((f"c{n}", kind) for n, kind in enumerate(KEEP_TYPES))
    schema = ReadOptions(keep=keep).keep_schema  # type: ignore[arg-type]
    assert schema.types == [pa.string(), pa.int64(), pa.float64(), pa.bool_()]
    assert ReadOptions().keep_schema is None


@pytest.mark.parametrize("share", ["", "1/0", "0.5", "-1/2", "1/2/3"])
def test_a_share_is_a_fraction(share: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"sample": share}, RecordOptions)
