"""FAULTS row 45: a rank that is there twice, is missing, or was told another world size.

Real processes meet over loopback as torchrun's do; each says how it ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support.distributed import rank_server
from support.ports import free_port

from olm_data.errors import OlmError
from olm_train.distributed.world import World


def join(environment: dict[str, str], seconds: float, ready: Any, ends: Any) -> None:
    """Start one rank with the others; put (what it was told, what it said) on the queue."""
    os.environ.update(environment)
    ready.wait(600)
    told = environment["RANK"], environment["WORLD_SIZE"]
    try:
        world = World.start(timeout=timedelta(seconds=seconds))
    except OlmError as error:
        ends.put((told, f"{error.exit_code} {error}"))
        return
    ends.put((told, f"together {world.gather(world.rank)}"))
    dist.barrier()
    world.stop()


def outcomes(ranks: Sequence[tuple[int, int]], seconds: float) -> list[tuple[Any, str]]:
    """Start processes told to be (rank, world size); return what each said, sorted."""
    port = free_port()
    with rank_server() as context:
        ends: Any = context.Queue()
        ready = context.Barrier(len(ranks))
        processes = []
        for rank, size in ranks:
            environment = {"RANK": str(rank), "WORLD_SIZE": str(size)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            processes.append(context.Process(target=join, args=(environment, seconds, ready, ends)))
            processes[-1].start()
    said = [ends.get(timeout=600) for _ in ranks]
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    return sorted(said)


@pytest.mark.slow
def test_45_ranks_that_are_all_there_once_go_on() -> None:
    said = outcomes([(rank, 4) for rank in range(4)], 600)
    assert [text for _, text in said] == ["together [0, 1, 2, 3]"] * 4


@pytest.mark.slow
def test_45_a_doubled_rank_is_refused_by_all() -> None:
    said = outcomes([(0, 4), (1, 4), (1, 4), (2, 4)], 600)
    assert [text.split("\n")[0] for _, text in said] == ["2 rank 1 was started twice"] * 4


@pytest.mark.slow
def test_45_another_world_size_is_refused_by_all() -> None:
    said = outcomes([(0, 3), (1, 3), (2, 4)], 600)
    assert {text[0] for _, text in said} == {"2"}
    assert all("was told of" in text and "ranks, another one of" in text for _, text in said)


@pytest.mark.slow
def test_45_a_missing_rank_is_named_by_all() -> None:
    said = outcomes([(0, 4), (1, 4), (2, 4)], 15)
    assert {text.split("\n")[0] for _, text in said} == {
        "5 1 of 4 ranks did not come within 15 s: 3"
    }


def test_45_a_rank_outside_of_the_run_is_refused_at_once() -> None:
    [(_, text)] = outcomes([(4, 4)], 600)
    assert text.startswith("2 this process was told to be rank 4 of 4")
