"""Mixtures of experts over ranks: one rank's bits at first, its losses, gradients and counts.

All checks of some ranks run in one launch (support/expert_ranks.py). The quick one has each
strategy, kind of recomputation and number of micro-batches once, the slow ones all of their
combinations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from support.distributed import run_ranks
from support.expert_ranks import (
    BALANCES,
    LAYOUTS,
    MUON,
    SOME,
    Trained,
    all_checks,
    assert_alike,
    of_experts,
    three_steps,
)
from support.training import ROWS, build, digest, full, train

pytestmark = pytest.mark.xdist_group("experts")  # its fixtures are made once


@pytest.fixture(scope="module")
def single() -> Trained:
    return three_steps(build(model=of_experts()), [ROWS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    module = build(model=of_experts())
    train(module, [ROWS], steps=[1, 2])
    dcp.save(module.state_dict(), checkpoint_id=path / "one")
    return path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, SOME), id="2"),
        pytest.param((2, LAYOUTS), id="2 all", marks=pytest.mark.slow),
        pytest.param((4, LAYOUTS), id="4 all", marks=pytest.mark.slow),
    ],
)
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    size, layouts = request.param
    found = run_ranks(all_checks, size, str(folder), layouts)
    assert all([*rank["layouts"]] == layouts for rank in found)
    return found


def test_every_layout_follows_one_rank(single: Trained, ranks: list[dict[str, Any]]) -> None:
    assert single.biases
    assert all(bias.abs().max() > 0 for bias in single.biases.values())
    for rank in ranks:
        for layout, run in rank["layouts"].items():
            assert_alike(run, single, layout)


@pytest.mark.parametrize("balance", BALANCES)
def test_a_balance_that_no_cut_changes_is_that_of_one_rank(
    balance: str, ranks: list[dict[str, Any]]
) -> None:
    alone = three_steps(build(model=of_experts(**BALANCES[balance])), [ROWS])
    for rank in ranks:
        assert_alike(rank["balances"][balance], alone)


def test_fewer_experts_than_ranks_train_as_on_one(ranks: list[dict[str, Any]]) -> None:
    alone = build(model=of_experts(n_experts=len(ranks) - 1, top_k=1))
    expected = three_steps(alone, [ROWS])
    for rank in ranks:
        assert_alike(rank["few"], expected)


def test_muon_takes_each_expert_by_itself_on_shards_too(ranks: list[dict[str, Any]]) -> None:
    alone = train(build(model=of_experts(), optim=MUON), [ROWS])
    assert "fsdp" in ranks[0]["muon"]
    for strategy in ranks[0]["muon"]:
        first, second, *_ = (rank["muon"][strategy] for rank in ranks)
        assert digest(first.weights) == digest(second.weights)
        assert first.losses == pytest.approx(alone.losses, rel=1e-4)


def test_bfloat16_stays_near_one_rank(ranks: list[dict[str, Any]]) -> None:
    alone = three_steps(build(model=of_experts(), param_dtype="bfloat16"), [ROWS])
    assert ranks[0]["bfloat16"].initial == alone.initial
    assert ranks[0]["bfloat16"].losses == pytest.approx(alone.losses, rel=5e-3)


def test_a_run_goes_on_to_the_bit_and_from_another_number_of_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    module = build(model=of_experts())
    train(module, [ROWS], steps=[1, 2])
    saved = digest(full(module)["model"])
    rest = train(module, [ROWS], steps=[3, 4])
    for rank in ranks:
        found = rank["resumed"]
        assert found["same"]
        assert found["loaded"] == saved
        assert found["losses"] == pytest.approx(rest.losses, rel=1e-5)
