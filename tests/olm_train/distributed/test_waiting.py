"""How long ranks wait, and how ranks and errors are told; a rank that is lost: test_matrix.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from olm_data.errors import UsageError
from olm_train.distributed.waiting import (
    CommConfig,
    RanksLostError,
    RankWatchdog,
    broke_off,
    numbers,
)
from olm_train.distributed.world import World


@given(st.sets(st.integers(0, 30), min_size=1))
def test_numbers_name_each_rank_once(them: set[int]) -> None:
    word, _, spans = numbers("rank", sorted(them)).partition(" ")
    assert word == ("ranks" if len(them) > 1 else "rank")
    named = []
    for span in spans.split(", "):
        first, _, last = span.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(them)


def test_only_errors_of_communication_are_taken_for_lost_ranks() -> None:
    assert broke_off(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert broke_off(RuntimeError("NCCL communicator was aborted"))
    assert not broke_off(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match=r"^gloo"), RankWatchdog(World(), nn.Module(), timeout=1):
        raise RuntimeError("gloo")  # alone nobody can be lost


@pytest.mark.parametrize("name", ["init_timeout_seconds", "train_timeout_seconds"])
@pytest.mark.parametrize("value", [0, -1.0, 1e9])
def test_a_wait_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError) as refusal:
        CommConfig(**{name: value})
    assert f"{name} is above 0 and at most 10,000,000" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gloo] Timed out waiting 1000ms for recv operation", "timed out waiting for other ranks"),
        ("[gloo] Connection closed by peer [127.0.0.1]:1", "lost its connection to other ranks"),
    ],
)
def test_a_connection_that_broke_is_not_called_a_wait(text: str, says: str) -> None:
    world = World(rank=1, size=2)
    with (
        pytest.raises(RanksLostError, match=f"rank 1 {says}") as caught,
        RankWatchdog(world, nn.Linear(1, 1), timeout=1.0),
    ):
        raise RuntimeError(text)
    assert caught.value.exit_code == 5
