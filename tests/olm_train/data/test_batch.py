"""Document offsets are checked before a kernel that trusts them sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError, ValidationError
from olm_data.rows.fields import RowBatch
from olm_train.data.batch import Batch, check_ids, check_offsets


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
        following=np.zeros(2, dtype=np.uint16),
        input_ids=ids,
        labels=ids,
        cu_seqlens=np.array([0, 4, 8], dtype=np.int32),
        max_seqlen=6,
        rows=np.arange(2),
    )
    Batch.from_rows(rows)
    with pytest.raises(ValidationError) as refusal:
        Batch.from_rows(replace(rows, cu_seqlens=np.array(offsets, dtype=np.int32)))
    assert why in str(refusal.value.why)


def test_pairs_and_mappings_are_rows_of_one_document_each() -> None:
    ids = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    for pair in ((ids, ids + 1), [ids, ids + 1], {"labels": ids + 1, "input_ids": ids}):
        batch = Batch.of(pair)
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
        assert (batch.labels - batch.input_ids == 1).all()
        assert batch.doc_start.tolist() == [[0] * 4] * 2
        assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
        assert batch.cu_seqlens.tolist() == [0, 4, 8]
        assert {t.dtype for t in (batch.doc_start, batch.positions, batch.cu_seqlens)} == {
            torch.int32
        }
        assert (batch.max_seqlen, batch.rows.tolist()) == (4, [-1, -1])
        assert Batch.of(batch) is batch


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(2, 3), r"float32 \[2, 3\]"),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), "float32"),
        ((torch.zeros(2, dtype=torch.int64),) * 2, r"int64 \[2\], int64 \[2\]"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, r"\{ids: int64 \[2, 3\]\}"),
        ([[1, 2], "x"], r"\(\(int, int\), str\)"),
    ],
)
def test_other_batches_are_refused_with_what_they_are(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Batch.of(given)


def test_labels_that_are_the_inputs_and_unknown_ids_are_refused() -> None:
    ids = torch.arange(12).reshape(2, 6)
    with pytest.raises(UsageError, match="the labels of a batch are its inputs"):
        Batch.of((ids, ids))
    same = torch.full((2, 6), 3)
    assert Batch.of((same, same)).input_ids.equal(same), "a text of one token has them so"
    batch = Batch.of((ids[:, :-1], ids[:, 1:]))
    assert check_ids(batch, 12) is batch
    with pytest.raises(UsageError, match="the label 11; the vocabulary of the model is 0 to 10"):
        check_ids(batch, 11)
    with pytest.raises(UsageError, match="the id 10"):
        check_ids(batch, 10)
