"""No rank takes a step that another one has no data for."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support.distributed import run_ranks
from support.own_data import Own

from olm_data.errors import InputError, ValidationError
from olm_train.distributed.world import World
from olm_train.trainer import next_batches


def _drawn() -> tuple[list[bool], list[str]]:
    rank = dist.get_rank()
    world = World(rank=rank, size=2, neighbours=range(2))
    loader: Any = Own(None, ends=2 + rank)  # rank 1 has a step more
    said: list[str] = []
    steps = iter(loader)
    given = [next_batches(steps, loader, world, reached=n, say=said.append) for n in range(3)]
    return [batches is not None for batches in given], said


def test_data_of_unknown_length_end_on_all_ranks_at_once_and_what_is_left_out_is_said() -> None:
    end = "the data ended after step 2; a step that the ranks 1 still had is left out"
    assert run_ranks(_drawn, 2) == [([True, True, False], [end])] * 2


def test_an_end_before_the_length_that_was_said_is_an_error() -> None:
    for loader, kind in ((Own(3), ValidationError), (Own(None), InputError)):
        with pytest.raises(kind):
            next_batches(iter([]), loader, World(), reached=0, say=print)
