"""Mixtures of experts over ranks: what layouts of test_parity.py do not ask of them.

All checks of some ranks run in one launch (support/expert_ranks.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from support.distributed import run_ranks
from support.expert_ranks import BALANCES, MUON, all_checks, of_experts
from support.training import ROWS, assert_alike, build, digest, three_steps

pytestmark = pytest.mark.xdist_group("experts")  # its fixtures are made once


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(all_checks, request.param)


@pytest.mark.parametrize("balance", BALANCES)
def test_a_balance_that_no_cut_changes_is_that_of_one_rank(
    balance: str, ranks: list[dict[str, Any]]
) -> None:
    alone = three_steps(build(model=of_experts(**BALANCES[balance])), [ROWS])
    for rank in ranks:
        assert_alike(rank[balance], alone)


def test_fewer_experts_than_ranks_train_as_on_one(ranks: list[dict[str, Any]]) -> None:
    alone = build(model=of_experts(n_experts=len(ranks) - 1, top_k=1))
    expected = three_steps(alone, [ROWS])
    for rank in ranks:
        assert_alike(rank["few"], expected)


def test_muon_takes_each_expert_by_itself_on_shards_too(ranks: list[dict[str, Any]]) -> None:
    alone = three_steps(build(model=of_experts(), optim=MUON), [ROWS])
    for strategy in ("fsdp", "ddp"):
        first, second, *_ = (rank["muon"][strategy] for rank in ranks)
        assert digest(first.weights) == digest(second.weights)
        assert first.losses == pytest.approx(alone.losses, rel=1e-4)
