"""The values that sources give: drops with bounded bytes, batches that only account."""

from __future__ import annotations

import msgspec
import numpy as np

from olm_data.dataset.inputs import ReadOptions, Unit
from olm_data.sources.base import RAW_BYTES, DocumentBatch, Scan
from olm_data.sources.formats import describe


def scan(until: int | None) -> Scan:
    input = msgspec.structs.replace(describe("a.txt", 1, ""), until=until)
    return Scan(input, Unit(input=7, start=0, stop=1, bytes=1), ReadOptions())


def test_a_drop_keeps_the_start_of_a_long_record_and_its_whole_size() -> None:
    drop = scan(None).drop("malformed", 5, "why", b"x" * (RAW_BYTES + 3))
    assert (drop.input, drop.position, drop.detail) == (7, 5, "why")
    assert (len(drop.raw), drop.size) == (RAW_BYTES, RAW_BYTES + 3)


def test_the_last_record_to_read_is_read() -> None:
    assert [scan(4).is_past(k) for k in (3, 4, 5)] == [False, False, True]
    assert not scan(None).is_past(1 << 60)


def test_a_batch_without_documents_only_accounts_for_records() -> None:
    batch = DocumentBatch.without_documents(rows_in=3, skipped={(0, "filtered"): 3})
    assert (batch.documents, batch.rows_in, len(batch.data)) == (0, 3, 0)


def test_documents_are_cut_by_the_offsets() -> None:
    data = np.frombuffer("a\u00e9bc".encode(), np.uint8)
    zero = np.zeros(2, np.int32)
    batch = DocumentBatch(data, np.array([0, 3, 5]), zero, zero.astype(np.int64))
    assert [batch.text(k) for k in range(batch.documents)] == ["a\u00e9", "bc"]
    assert batch.text_bytes.tolist() == [3, 2]
