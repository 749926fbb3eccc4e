"""Rows of requests: each request once, cut from the left, its continuation alone labelled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olm_train.distributed.world import World
from olm_train.extensions.downstream.tasks import RequestRows
from olm_train.model.loss import IGNORE_INDEX

SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=30)


@settings(max_examples=60)
@given(sizes=SIZES, length=st.integers(6, 20), rows=st.integers(1, 3), packed=st.booleans())
def test_each_request_is_read_once_with_its_continuation_as_labels(
    sizes: list[tuple[int, int]], length: int, rows: int, packed: bool
) -> None:
    context = np.array([a for a, _ in sizes], np.int64)
    ends = np.array([a + b for a, b in sizes], np.int64).cumsum()
    tokens = np.arange(1, ends[-1] + 1)  # each id once
    found = RequestRows(tokens, ends, context, length, rows * length, world=World(), packed=packed)
    seen: dict[int, tuple[list[int], list[int]]] = {}
    for batch, members, offsets in found:
        assert batch.input_ids.shape == (rows, length)
        ids, labels = batch.input_ids.flatten(), batch.labels.flatten()
        for request, begin, end in zip(members, offsets[:-1], offsets[1:], strict=True):
            piece = labels[begin:end]
            if request < 0:
                assert (piece == IGNORE_INDEX).all()
                continue
            assert request not in seen
            seen[int(request)] = ids[begin:end].tolist(), piece[piece >= 0].tolist()
            assert batch.positions.flatten()[begin:end].tolist() == list(range(end - begin))
            assert (batch.doc_start.flatten()[begin:end] == begin % length).all()
    assert sorted(seen) == list(range(len(sizes)))
    for number, (before, after) in enumerate(sizes):
        own = tokens[ends[number] - before - after : ends[number]].tolist()
        kept = own[-(length + 1) :]
        assert seen[number] == (kept[:-1], kept[-min(after, len(kept) - 1) :])
        assert found.lost[number] == len(own) - len(kept)
        assert found.cut[number] == (after > length)
    if not packed:
        assert found.rows == len(sizes)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_have_as_many_batches_and_all_requests_between_them(size: int) -> None:
    ends = np.arange(3, 3 * 20, 3)
    seen, batches = list[int](), set[int]()
    for rank in range(size):
        world = World(rank=rank, size=size, device=torch.device("cpu"))
        found = RequestRows(
            np.arange(ends[-1]), ends, np.ones(len(ends), np.int64), 5, 10, world=world
        )
        batches.add(len([seen.extend(members[members >= 0]) for _, members, _ in found]))
    assert len(batches) == 1
    assert sorted(seen) == list(range(len(ends)))
