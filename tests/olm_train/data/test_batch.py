"""Document offsets are checked before a kernel that trusts them sees them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import ValidationError
from olm_data.rows.reader import RowBatch
from olm_train.data.batch import Batch, check_offsets


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 5))
def test_offsets_of_any_documents_pass(lengths: list[int], padding: int) -> None:
    offsets = np.array([0, *np.cumsum(lengths), *[sum(lengths)] * padding], dtype=np.int32)
    check_offsets(offsets, sum(lengths), max(lengths))


@pytest.mark.parametrize(
    ("offsets", "why"),
    [
        ([1, 4, 8], "begin at 0"),
        ([], "begin at 0"),
        ([0, 4, 7], "do not end at the 8 tokens"),
        ([0, 4, 9], "do not end at the 8 tokens"),
        ([0, 6, 4, 8], "smaller than the one before"),
        ([0, 8], "longer than 6"),
    ],
)
def test_a_batch_with_wrong_offsets_is_not_made(offsets: list[int], why: str) -> None:
    ids = np.zeros((2, 4), dtype=np.int64)
    rows = RowBatch(
        tokens=np.zeros((2, 5), dtype=np.uint16),
        input_ids=ids,
        labels=ids,
        doc_start=ids.astype(np.int32),
        positions=ids.astype(np.int32),
        cu_seqlens=np.array([0, 4, 8], dtype=np.int32),
        max_seqlen=6,
        rows=np.arange(2),
    )
    Batch.from_rows(rows)
    with pytest.raises(ValidationError) as refusal:
        Batch.from_rows(replace(rows, cu_seqlens=np.array(offsets, dtype=np.int32)))
    assert why in str(refusal.value.why)
