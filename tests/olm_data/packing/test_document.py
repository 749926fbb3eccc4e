"""Document packing: rows of its own for each document."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.packing import LENGTHS, documents, inputs, rows_of

from olm_data.packing.base import PackingCost
from olm_data.packing.document import DocumentPacking

UNUSED: Any = None


@given(LENGTHS, st.integers(1, 20))
def test_a_document_row_holds_one_document(lengths: list[int], sequence_length: int) -> None:
    rows = rows_of(
        DocumentPacking().pack(UNUSED, [documents(lengths)], sequence_length, PackingCost())
    )
    assert all(len(row) == 1 for row in rows)
    assert [t for row in rows for t in inputs(row, sequence_length)] == list(range(sum(lengths)))
    assert len(rows) == sum(-(-n // sequence_length) for n in lengths)
