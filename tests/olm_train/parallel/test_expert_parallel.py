"""Experts dealt to ranks, or whole on each: what layouts of test_parity.py do not ask of them.

All checks of two ranks run in one launch, those of four in another (support/dealt_ranks.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support.dealt_ranks import (
    OPTIMS,
    all_checks,
    compiled_checks,
    eight_checks,
    four_checks,
    odd_steps,
    to_one_expert,
)
from support.distributed import run_ranks
from support.expert_ranks import BALANCES, MUON, of_experts
from support.training import MODEL, ROWS, Run, assert_alike, build, digest, two_steps

from olm_data.errors import UsageError
from olm_train.estimate.memory import memory_of_step
from olm_train.model.decoder import build_decoder
from olm_train.parallel.config import ExpertParallelConfig
from olm_train.parallel.expert import require_dealable
from olm_train.parallel.mesh import Mesh

pytestmark = pytest.mark.xdist_group("dealt")  # its fixtures are made once
Ranks = list[dict[Any, Any]]
QUICK = ["muon", "limit"]
"""Optimisers of two ranks: four have all."""


@pytest.fixture(scope="module")
def single() -> Run:
    return two_steps(build(model=of_experts()), [ROWS])


@pytest.fixture(scope="module")
def four() -> Ranks:
    return run_ranks(four_checks, 4)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = (
        request.getfixturevalue("four") if request.param == 4 else run_ranks(all_checks, 2, QUICK)
    )
    return found


def test_copies_of_ranks_follow_one_rank(single: Run, ranks: Ranks) -> None:
    """Gradients of experts are summed once over all tokens: not over all ranks, nor divided."""
    for rank in ranks:
        assert_alike(rank["hsdp"], single)


@pytest.mark.parametrize("balance", BALANCES)
def test_a_balance_that_no_cut_changes_is_that_of_one_rank(balance: str, ranks: Ranks) -> None:
    alone = two_steps(build(model=of_experts(**BALANCES[balance])), [ROWS])
    for rank, way in product(ranks, ("dealt", "whole")):
        assert_alike(rank["balances"][balance, way], alone, way)


def test_fewer_experts_than_ranks_train_as_on_one(ranks: Ranks) -> None:
    alone = build(model=of_experts(n_experts=len(ranks) - 1, top_k=1))
    expected = two_steps(alone, [ROWS])
    for rank in ranks:
        assert_alike(rank["few"], expected)


def test_one_expert_a_rank(ranks: Ranks) -> None:
    alone = two_steps(build(model=of_experts(n_experts=len(ranks), top_k=1)), [ROWS])
    for rank in ranks:
        assert_alike(rank["one each"], alone)


def test_ranks_that_get_no_token(ranks: Ranks) -> None:
    alone = two_steps(to_one_expert(build(model=of_experts(top_k=1))), [ROWS])
    assert alone.counts[:, 1:].sum() == 0
    for rank in ranks:
        assert_alike(rank["one for all"], alone)
    assert min(ranks[0]["rows of products"]) > 1
    assert ranks[1]["rows of products"] == {1}  # of zeros: not all devices multiply no rows


def test_a_gradient_may_lie_column_by_column(ranks: Ranks) -> None:
    for rank in ranks:
        found, expected = rank["transposed"]
        assert torch.equal(found, expected)


def test_a_capacity_drops_what_it_drops_where_each_rank_has_all_experts(ranks: Ranks) -> None:
    for rank in ranks:
        found, expected = rank["capacity"]
        assert expected.metrics["experts/dropped 2"] > 0
        assert_alike(found, expected)


def test_tokens_that_are_no_multiple_of_anything(ranks: Ranks) -> None:
    expected = odd_steps(build(model=of_experts()))
    for rank in ranks:
        assert rank["odd"] == pytest.approx(expected, rel=1e-6)


def test_every_optimizer_takes_the_steps_of_one_rank(ranks: Ranks) -> None:
    names = [key[1] for key in ranks[0] if key[0] == "optim"]
    assert {*names} >= {*QUICK}
    for name in names:
        optim = OPTIMS.get(name, MUON)  # ways to share whole experts are with Muon
        alone = two_steps(build(model=of_experts(), optim=optim), [ROWS])
        for rank in ranks:
            run = rank["optim", name]
            assert run.losses == pytest.approx(alone.losses, rel=1e-4), name
            assert run.norms == pytest.approx(alone.norms, rel=1e-3), name
            assert run.norms == ranks[0]["optim", name].norms
            assert digest(run.weights) == digest(ranks[0]["optim", name].weights)


def test_bfloat16_stays_near_one_rank(ranks: Ranks) -> None:
    alone = two_steps(build(model=of_experts(), param_dtype="bfloat16"), [ROWS])
    for rank in ranks:
        assert rank["bfloat16"].initial == alone.initial
        assert rank["bfloat16"].losses == pytest.approx(alone.losses, rel=5e-3)


def test_a_step_that_one_rank_cannot_take_is_left_out_by_all(ranks: Ranks) -> None:
    losses = {rank["non-finite"]["loss"] for rank in ranks}
    assert len(losses) == 1
    for rank in ranks:
        assert rank["non-finite"]["bad"] == 1
        assert rank["non-finite"]["unchanged"]
        assert rank["non-finite"]["loss"] > 0


def test_each_rank_holds_a_part_of_its_experts_alone(ranks: Ranks) -> None:
    rest = len(ranks) // 2
    for rank in ranks:
        held = {name.removeprefix("blocks.0."): shape for name, shape in rank["held"].items()}
        assert held["feed_forward.experts.w_gate_up"] == (3, 2 * 24 // rest, 32)
        assert held["feed_forward.experts.w_down"] == (3, 32 // rest, 24)
        assert held["attention.w_out.weight"] == (32 // len(ranks), 32)


def test_memory_is_counted_as_it_is_held(ranks: Ranks) -> None:
    config = build().config
    memory, whole = (
        memory_of_step(
            of_experts(),
            replace(config, ep_config=ep),
            sequence_length=32,
            world_size=len(ranks),
            micro_batches=2,
        )
        for ep in (ExpertParallelConfig(degree=2), None)
    )
    held = dict(ranks[0]["held"])
    assert memory.optimizer == held.pop("state")
    assert memory.weights == 4 * sum(map(math.prod, held.values()))
    experts = 2 * 6 * 3 * 24 * 32
    assert memory.gradients == whole.gradients - 4 * experts // 2
    assert memory.gathered < whole.gathered


def test_tokens_are_exchanged_twice_forward_and_twice_back(ranks: Ranks) -> None:
    """And their counts once; what is computed again is exchanged again."""
    for rank in ranks:
        assert rank["traffic"] == {"kept": 2 * 5, "full": 2 * 8, "ops": 2 * 8}


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_that_share_rows_follow_one_rank(degree: int, four: Ranks) -> None:
    expected = two_steps(build(model=of_experts(n_experts=8)), [ROWS])
    for rank in four:
        assert_alike(rank["context", degree], expected)


@pytest.mark.slow
def test_weights_in_the_memory_of_the_host_follow_one_rank(single: Run, four: Ranks) -> None:
    for rank in four:
        assert_alike(rank["offload"], single)


@pytest.mark.slow
def test_copies_of_dealt_and_cut_experts_follow_one_rank(single: Run) -> None:
    muon = two_steps(build(model=of_experts(), optim=MUON), [ROWS])
    for rank in run_ranks(eight_checks, 8):
        assert_alike(rank["hsdp"], single)
        assert_alike(rank["context"], single)
        assert rank["muon"].losses == pytest.approx(muon.losses, rel=1e-4)


@pytest.mark.slow
def test_compiled_blocks_follow_one_rank() -> None:
    expected = two_steps(build(model=of_experts(), param_dtype="bfloat16"), [ROWS])
    for found in run_ranks(compiled_checks, 2):
        assert found.losses == pytest.approx(expected.losses, rel=5e-3)


# ---- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        (MODEL, Mesh(dp_shard=2, ep=2), "no experts to deal"),
        (of_experts(), Mesh(dp_shard=4, ep=4), "does not divide the 6 experts.*set it to 3 or 6"),
        (of_experts(), Mesh(dp_shard=6, ep=2), "cannot be cut evenly over 3 ranks"),
    ],
)
def test_models_that_cannot_be_dealt_are_refused(model: Any, mesh: Mesh, message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        require_dealable(build_decoder(model, device="meta"), mesh)
