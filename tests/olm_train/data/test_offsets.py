"""Offsets of documents have little padding and few shapes; too many documents are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_train.data.batch import ROOMS, fitted
from olm_train.model.attention_backend import MAX_DOCUMENTS, DocumentLayout
from olm_train.model.attention_varlen import kernel_backend


def padded(documents: int, bound: int) -> np.ndarray:
    """Offsets of documents of two tokens, in room for `bound` of them."""
    offsets = np.full(bound + 1, 2 * documents, dtype=np.int32)
    offsets[: documents + 1] = np.arange(0, 2 * documents + 1, 2)
    return offsets


@given(documents=st.integers(1, 200_000), spare=st.integers(0, 2_000_000))
def test_padding_is_cut_and_nothing_else(documents: int, spare: int) -> None:
    offsets = padded(documents, documents + spare)
    cut = fitted(offsets)
    assert np.array_equal(np.unique(cut), np.unique(offsets))
    assert cut[-1] == offsets[-1]
    empty = len(cut) - 1 - documents
    assert empty <= max(256, 3 * documents) or documents > MAX_DOCUMENTS
    assert np.shares_memory(cut, offsets)


def test_shapes_are_few() -> None:
    bound = 4 * 10**6
    counts = [*range(1, 2000, 7), *range(2000, MAX_DOCUMENTS + 1, 977), MAX_DOCUMENTS]
    assert {len(fitted(padded(n, bound))) - 1 for n in counts} == set(ROOMS)
    assert len(fitted(padded(9, 40))) == 41  # a small bound is one shape for all


def test_more_documents_than_a_launch_takes_are_refused_before_it() -> None:
    backend = kernel_backend(lambda: None, lambda: None)  # type: ignore[arg-type,return-value]

    def prepare(documents: int) -> object:
        offsets = torch.from_numpy(fitted(padded(documents, 4 * 10**5)))
        return backend.prepare(DocumentLayout(None, offsets, 2))

    assert prepare(MAX_DOCUMENTS)
    with pytest.raises(UsageError, match="more than 65,535 documents") as refused:
        prepare(MAX_DOCUMENTS + 1)
    assert refused.value.where == "train_module.rank_microbatch_size"
