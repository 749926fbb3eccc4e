"""FAULTS row 46: ranks with different seeds, configurations or locks are refused at the start."""

from __future__ import annotations

import pytest
from support.distributed import run_ranks
from support.runs import group_world

from olm_data.errors import ValidationError
from olm_train.distributed.agreement import require_agreement

CONFIG = {"seed": 1, "train_module": {"optim": {"lr": 3e-4, "betas": [0.9, 0.95]}}}


def check(kind: str) -> str:
    """Meet the others with something different on rank 2; return the error."""
    world = group_world()
    odd = world.rank == 2
    config = {**CONFIG, "seed": 2} if odd and kind == "seed" else CONFIG
    try:
        require_agreement(world, "b" * 64 if odd and kind == "lock" else "a" * 64, config)
    except ValidationError as error:
        return f"{error.exit_code} {error}"
    return ""


def check_all() -> list[str]:
    return [check(kind) for kind in ("same", "seed", "lock")]


@pytest.mark.slow
def test_46_every_rank_refuses_and_names_who_differs_in_what() -> None:
    first, *others = run_ranks(check_all, 4)
    assert all(other == first for other in others)
    same, seed, lock = first
    assert same == ""
    assert {text[0] for text in (seed, lock)} == {"3"}
    assert "configuration: rank 0: " in seed
    assert "rank 2: " in seed
    assert "mixture lock: rank 0: aaaaaaaaaaaa, rank 2: bbbbbbbbbbbb" in lock
