"""Micro-batches: their offsets, what is refused, and how ranks share one."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import make_batch

from olm_data.errors import UsageError, ValidationError
from olm_data.rows.fields import RowBatch
from olm_train.data.batch import ROOMS, Batch, check_ids, check_offsets, fitted
from olm_train.data.dealing import (
    TOLERANCE,
    ContextShare,
    Dealing,
    deal,
    imbalance,
    needs_of,
    pairs_of_chunks,
    require_equal_parts,
)
from olm_train.model.attention_backend import MAX_DOCUMENTS, DocumentLayout
from olm_train.model.attention_varlen import kernel_backend


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


DOCUMENTS = st.lists(st.integers(1, 90), min_size=1, max_size=30)
WINDOWS = st.sampled_from([(None,), (7,), (7, None), (3, 3, 40)])


def offsets(lengths: list[int], tokens: int) -> np.ndarray:
    """Of documents of these lengths, and of what is left of `tokens`; the end twice, as padding."""
    ends = [end for end in accumulate(lengths) if end < tokens]
    return np.array([0, *ends, tokens, tokens], np.int32)


@given(DOCUMENTS, st.integers(1, 6), st.integers(1, 40), WINDOWS, st.integers(1, 16))
def test_every_token_has_one_rank_and_each_rank_as_many(
    lengths: list[int], degree: int, each: int, windows: tuple[int | None, ...], least: int
) -> None:
    tokens = degree * each
    cu_seqlens = offsets(lengths, tokens)
    dealt = deal(cu_seqlens, degree, windows, least=least)
    assert dealt.dtype == np.int64
    assert dealt.shape[0] == degree
    assert tokens % dealt.size == 0
    assert sorted(dealt.flatten().tolist()) == list(range(dealt.size))
    assert (np.diff(dealt, axis=1) > 0).all()
    assert np.array_equal(dealt, deal(cu_seqlens, degree, windows, least=least))


@given(DOCUMENTS, WINDOWS, st.sampled_from([1, 2, 5, 10]))
def test_pairs_are_those_that_a_loop_counts(
    lengths: list[int], windows: tuple[int | None, ...], size: int
) -> None:
    tokens = 60
    cu_seqlens = offsets(lengths, tokens)
    expected = [0] * (tokens // size)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for place in range(start, end):
            for window in windows:
                first = start if window is None else max(start, place - window + 1)
                expected[place // size] += place + 1 - first
    assert pairs_of_chunks(cu_seqlens, size, windows).tolist() == expected


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(8))
def test_attention_costs_ranks_alike(seed: int, degree: int) -> None:
    """Lengths as of texts: most of them short, some longer than a row."""
    drawn = np.random.default_rng(seed).lognormal(6, 1.3, 400)
    tokens = degree * 2048
    cu_seqlens = offsets(np.maximum(drawn, 1).astype(int).tolist(), tokens)
    dealt = deal(cu_seqlens, degree)
    pairs = pairs_of_chunks(cu_seqlens, tokens // dealt.size, (None,))
    assert imbalance(pairs, dealt) <= TOLERANCE


def test_one_document_is_dealt_from_both_ends() -> None:
    dealt = deal(np.array([0, 4096], np.int32), 8)
    pairs = pairs_of_chunks(np.array([0, 4096], np.int32), 4096 // dealt.size, (None,))
    assert imbalance(pairs, dealt) < 1e-3
    assert dealt.tolist() == [[rank, 15 - rank] for rank in range(8)]


def test_chunks_are_no_smaller_than_they_have_to_be() -> None:
    """Documents of one length: a chunk of a rank does, and of one document two."""
    assert deal(np.arange(0, 8193, 64, dtype=np.int32), 4).shape == (4, 1)
    assert deal(np.array([0, 8192], np.int32), 4).shape == (4, 2)


@given(DOCUMENTS, st.integers(1, 5), st.integers(1, 4), st.integers(1, 7), WINDOWS, st.data())
def test_ranks_send_the_keys_that_queries_attend_to_and_no_others(
    lengths: list[int], degree: int, chunks: int, size: int, windows: tuple[int | None, ...],
    data: st.DataObject,
) -> None:  # fmt: skip
    tokens = degree * chunks * size
    cu_seqlens = offsets(lengths, tokens)
    dealt = np.array(data.draw(st.permutations(range(degree * chunks))), np.int64)
    dealt = np.sort(dealt.reshape(degree, chunks), axis=1)
    owned = (dealt[:, :, None] * size + np.arange(size)).reshape(degree, -1)
    needs = [needs_of(cu_seqlens, dealt, rank, windows) for rank in range(degree)]
    begin = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    for window in windows:
        for rank, own in enumerate(owned):
            need = needs[rank][window]
            first = begin[own] if window is None else np.maximum(begin[own], own - window + 1)
            seen = {key for a, b in zip(first, own, strict=True) for key in range(a, b + 1)}
            got = need.got.split(need.of)
            assert sorted(need.got.tolist()) == sorted(seen - {*own.tolist()})
            for other, sender in enumerate(needs):
                sent = sender[window].sent.split(sender[window].to)[rank]
                assert owned[other][sent.numpy()].tolist() == got[other].tolist()


def test_the_key_before_a_chunk_is_needed_in_a_window_of_one_token() -> None:
    need = needs_of(np.array([0, 3, 8], np.int32), np.array([[0], [1]]), 1, (1,))[1]
    assert (need.got.tolist(), need.of, need.to) == ([3], [1, 0], [0, 0])


@pytest.mark.parametrize(("tokens", "near"), [(64, "(next to it 63 or 66)"), (2, "(next to it 3)")])
def test_tokens_that_ranks_cannot_have_in_equal_parts_are_refused(tokens: int, near: str) -> None:
    with pytest.raises(UsageError, match=f"3 ranks cannot have as many .* {tokens}") as error:
        deal(np.array([0, tokens], np.int32), 3)
    assert near in str(error.value)
    with pytest.raises(UsageError):
        require_equal_parts(tokens, 3)


def test_shares_put_together_are_the_micro_batch() -> None:
    dealing = Dealing(4, (None, 9))
    whole = dealing(make_batch([[50, 14], [64], [1] * 64], vocab_size=50))
    assert dealing(whole) is whole
    shares = [ContextShare.take(whole, rank, lambda share: []) for rank in range(4)]
    order = torch.cat([share.own for share in shares])
    for name in ("input_ids", "labels", "positions"):
        together = torch.cat([getattr(share, name)[0] for share in shares])
        found = torch.empty_like(together).index_copy_(0, order, together)
        assert torch.equal(found, getattr(whole, name).flatten())
    assert {share.input_ids.shape for share in shares} == {(1, 48)}
    for share in shares:
        assert torch.equal(share.cu_seqlens, whole.cu_seqlens)
        assert torch.equal(share.rows, whole.rows)
