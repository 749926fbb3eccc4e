"""Commit records, their accounts, and the informational part of a manifest."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.account import (
    BAD_REASONS,
    DROP_REASONS,
    SKIP_REASONS,
    InputAccount,
    check_accounts,
    dropped_of,
    input_digest,
    pack,
    totals_by_input,
    unpack,
)
from olm_data.dataset.inputs import Unit
from olm_data.dataset.record import (
    Blocks,
    ImportedFile,
    ShardRecord,
    documents_bound,
    encode_units,
    stream_windows,
    window_counts,
)
from olm_data.dataset.tools import Copies, PassedCount, Tools
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


COUNTS = st.integers(0, 50)
DROPS = st.dictionaries(st.sampled_from([*DROP_REASONS, *SKIP_REASONS]), st.integers(1, 9))


@st.composite
def accounts(draw: st.DrawFn) -> list[InputAccount]:
    return [
        InputAccount(
            input=draw(st.integers(0, 3)),
            units=((number, number + 1),),
            documents=draw(COUNTS),
            held_out=draw(COUNTS),
            dropped=draw(DROPS),
            special_hits=draw(COUNTS),
            bad=(),
            sha256="",
            replaced=draw(COUNTS),
            unknown_tokens=draw(COUNTS),
            unknown_documents=draw(COUNTS),
        )
        for number in range(draw(st.integers(1, 6)))
    ]


@given(accounts())
def test_totals_lose_and_repeat_no_record(given_accounts: list[InputAccount]) -> None:
    totals = totals_by_input(given_accounts)
    assert list(totals) == sorted({each.input for each in given_accounts})
    for field in ("documents", "held_out", "special_hits", "replaced", "documents_in"):
        assert sum(getattr(t, field) for t in totals.values()) == sum(
            getattr(each, field) for each in given_accounts
        )
    assert dropped_of(totals.values()) == dropped_of(given_accounts)


def planned(given_accounts: list[InputAccount]) -> list[Unit]:
    return [
        Unit(input=each.input, start=start, stop=stop, bytes=1)
        for each in given_accounts
        for start, stop in each.units
    ]


WRONG = {
    "documents": "does not add up: documents: ",
    "held_out": "does not add up: documents held out: ",
    "dropped": "does not add up: drops: ",
    "lost": "units read are not the units planned",
    "twice": "units read are not the units planned",
    "shorter": "units read are not the units planned",
}


@given(accounts(), st.sampled_from(sorted(WRONG)))
def test_an_account_that_is_one_off_is_refused(
    given_accounts: list[InputAccount], what: str
) -> None:
    units = planned(given_accounts)
    stored = {
        "documents": sum(each.documents for each in given_accounts),
        "held_out": sum(each.held_out for each in given_accounts),
    }
    dropped = Counter(dropped_of(given_accounts))
    check_accounts("task 0", units, given_accounts, dropped=dropped, **stored)
    if what in ("lost", "twice"):
        units = units[1:] if what == "lost" else [units[0], *units]
    elif what == "shorter":
        units = [msgspec.structs.replace(units[0], stop=units[0].stop + 1), *units[1:]]
    elif what == "dropped":
        dropped["empty"] += 1
    else:
        stored[what] += 1
    with pytest.raises(ValidationError, match=WRONG[what]):
        check_accounts("task 0", units, given_accounts, dropped=dropped, **stored)


@given(st.lists(st.booleans(), max_size=300))
def test_packed_ids_read_back_as_they_were(found: list[bool]) -> None:
    assert unpack(pack(np.array(found, bool)), len(found)).tolist() == found


def test_packed_ids_beyond_the_size_are_refused_before_they_take_memory() -> None:
    with pytest.raises(ValueError, match="more than 2 values"):
        unpack(pack(np.array([False, False, True])), 2)
    bomb = base64.b64encode(zlib.compress(bytes(1 << 20))).decode()
    with pytest.raises(ValueError, match="more than 36 bytes"):
        unpack(bomb, 9)
    with pytest.raises(ValueError, match="header"):
        unpack(base64.b64encode(b"no zlib").decode(), 9)


def test_an_inputs_digest_is_that_of_its_parts_in_order() -> None:
    parts = [hashlib.sha256(text).hexdigest() for text in (b"a", b"b")]
    raw = b"".join(bytes.fromhex(part) for part in parts)
    assert input_digest(parts) == hashlib.sha256(raw).hexdigest() != input_digest(parts[::-1])


def test_every_bad_reason_is_a_reason_and_zeros_stay_out_of_the_file() -> None:
    assert DROP_REASONS.keys() > BAD_REASONS
    empty = InputAccount(
        input=0, units=(), documents=0, held_out=0, dropped={}, special_hits=0, bad=(), sha256=""
    )
    assert b"replaced" not in msgspec.json.encode(empty)


STORED = {
    "olm": "0.22.0",
    "python": "3.11.7",
    "numpy": "2.4.6",
    "encoder": "gigatoken",
    "tokenizer": "gpt2",
    "passed_over": '{"hidden":{"count":2,"names":[".a",".b"]}}',
    "duplicates": "50",
    "duplicate_bytes": "1234",
    "content": "0f" * 16,
}

TOOLS = Tools(
    versions={"olm": "0.22.0", "python": "3.11.7", "numpy": "2.4.6"},
    encoder="gigatoken",
    tokenizer="gpt2",
    passed_over={"hidden": PassedCount(2, [".a", ".b"])},
    copies=Copies(50, 1234, "0f" * 16),
)


def test_what_is_stored_are_the_texts_of_version_1() -> None:
    assert TOOLS.stored() == STORED
    assert Tools.of(STORED) == TOOLS
    assert Tools().stored() == {}
    assert Tools.of({}) == Tools()


@pytest.mark.parametrize("text", ["", "-1", "x", "1.5", "9" * 20])
def test_numbers_that_are_none_are_left_out(text: str) -> None:
    assert Tools.of({**STORED, "duplicates": text}).copies is None
