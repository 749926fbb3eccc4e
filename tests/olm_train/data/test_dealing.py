"""Every token of a micro-batch has one rank, as many have each, and attention costs them alike."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import make_batch

from olm_data.errors import UsageError
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
    for name in ("input_ids", "labels"):
        together = torch.cat([getattr(share, name)[0] for share in shares])
        found = torch.empty_like(together).index_copy_(0, order, together)
        assert torch.equal(found, getattr(whole, name).flatten())
    assert {share.input_ids.shape for share in shares} == {(1, 48)}
    for share in shares:
        assert torch.equal(share.cu_seqlens, whole.cu_seqlens)
        assert torch.equal(share.rows, whole.rows)
