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
    Dealing,
    Share,
    deal,
    imbalance,
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
    assert dealt.shape[1] >= 2 or each == 1 or least > 1
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
    """Documents of one length: two chunks of a rank do."""
    assert deal(np.arange(0, 8193, 64, dtype=np.int32), 4).shape == (4, 2)


@pytest.mark.parametrize(("tokens", "near"), [(64, "be 63 or 66,"), (2, "be 3,")])
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
    shares = [Share.take(whole, rank, lambda share: []) for rank in range(4)]
    order = torch.cat([share.own for share in shares])
    for name in ("input_ids", "labels"):
        together = torch.cat([getattr(share, name)[0] for share in shares])
        found = torch.empty_like(together).index_copy_(0, order, together)
        assert torch.equal(found, getattr(whole, name).flatten())
    assert {share.input_ids.shape for share in shares} == {(1, 48)}
    for share in shares:
        assert torch.equal(share.cu_seqlens, whole.cu_seqlens)
        assert torch.equal(share.rows, whole.rows)
