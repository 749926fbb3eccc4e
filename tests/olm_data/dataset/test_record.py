"""The commit record: its units are accounts or imported files, and what was changed is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.account import InputAccount
from olm_data.dataset.record import (
    Blocks,
    ImportedFile,
    ShardRecord,
    documents_bound,
    encode_units,
    stream_windows,
    window_counts,
)
from olm_data.errors import ValidationError

ACCOUNT = InputAccount(
    input=1,
    units=((0, 9),),
    documents=2,
    held_out=0,
    dropped={"empty": 1},
    special_hits=0,
    bad=(),
    sha256="",
)


def record_of(units: Sequence[InputAccount | ImportedFile], **changes: Any) -> ShardRecord:
    record = ShardRecord(
        version=1,
        name="shard-00000",
        plan="p",
        tokens=4,
        documents=2,
        text_bytes=9,
        max_token_id=3,
        files={},
        blocks=Blocks(65536, "0" * 8),
        units=encode_units(units),
        dropped={},
        windows={"64": (2, 2, 2)},
    )
    return msgspec.structs.replace(record, **changes)


def test_units_read_back_as_what_they_are() -> None:
    tokenized, imported = record_of([ACCOUNT]), record_of([ImportedFile(input=0, not_ended=3)])
    for record in (tokenized, imported):
        assert ShardRecord.parse(record.encode()) == record
        assert ShardRecord.parse(record.encode()).encode() == record.encode()
    assert tokenized.accounts == [ACCOUNT]
    assert (tokenized.not_ended, imported.not_ended) == (0, 3)
    with pytest.raises(MalformedJson):
        _ = imported.accounts


def test_what_a_later_release_says_of_an_input_hinders_only_who_counts_it() -> None:
    value = json.loads(record_of([ACCOUNT]).encode())
    value["units"][0]["more"] = 1
    record = ShardRecord.parse(json.dumps(value).encode())
    assert record.tokens == 4
    with pytest.raises(MalformedJson, match="more"):
        _ = record.accounts


@pytest.mark.parametrize(
    "change", [{"units": 3}, {"units": [7]}, {"windows": {"65": [1, 1, 1]}}, {"more": 1}]
)
def test_a_record_of_another_shape_is_malformed(change: dict[str, Any]) -> None:
    value = json.loads(record_of([]).encode()) | change
    with pytest.raises(MalformedJson):
        ShardRecord.parse(json.dumps(value).encode())


def test_a_record_is_the_manifests_and_has_a_checksum_for_each_block() -> None:
    data = record_of([]).encode()
    sha256 = hashlib.sha256(data).hexdigest()
    assert ShardRecord.decode(data, "here", sha256=sha256, token_bytes=65536).tokens == 4
    with pytest.raises(ValidationError, match="no checksum for each block"):
        ShardRecord.decode(data, "here", sha256=sha256, token_bytes=65537)
    with pytest.raises(ValidationError, match="does not match its digest"):
        ShardRecord.decode(data + b" ", "here", sha256=sha256, token_bytes=65536)


# Bounds on the documents of a window: never exceeded, whatever the lengths and the shards.
LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=30)


def ends_of(lengths: list[int]) -> np.ndarray:
    return np.cumsum(lengths).astype(np.uint64)


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.integers(1, 400))
def test_no_window_touches_more_documents_than_the_bound(
    shards: list[list[int]], width: int
) -> None:
    counts = [(sum(shard), len(shard), window_counts(ends_of(shard))) for shard in shards]
    bound = documents_bound(stream_windows(counts), width)
    ends = ends_of([n for shard in shards for n in shard])
    starts = np.concatenate([[0], ends[:-1]])
    for first in range(int(ends[-1])):
        assert np.sum((starts < first + width) & (ends > first)) <= bound


@given(LENGTHS)
def test_the_counts_of_a_shard_end_with_the_first_width_that_covers_it(lengths: list[int]) -> None:
    counts = window_counts(ends_of(lengths))
    widths = list(map(int, counts))
    assert widths == [64 << k for k in range(len(widths))]
    assert widths[-1] >= sum(lengths) > (widths[-1] // 2 if len(widths) > 1 else 0)
    assert counts[str(widths[-1])] == (len(lengths),) * 3


@pytest.mark.parametrize(("bounds", "width", "most"), [({}, 7, 7), ({"64": 3}, 200, 13)])
def test_a_width_that_was_not_counted_is_bounded_by_those_that_were(
    bounds: dict[str, int], width: int, most: int
) -> None:
    assert documents_bound(bounds, width) == most


def test_without_documents_nothing_begins() -> None:
    assert window_counts(np.zeros(0, np.uint64)) == {}
    assert stream_windows([]) == {}
