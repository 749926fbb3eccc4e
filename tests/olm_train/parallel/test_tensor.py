"""Tensor parallelism: what one rank computes, however its matrices and its tokens are cut.

All checks of two ranks run in one launch, those of four in another (support/tensor_ranks.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import make_batch
from support.distributed import run_ranks
from support.expert_ranks import BALANCES, MUON, of_experts
from support.tensor_ranks import (
    BASE,
    FOUR,
    OPTIMS,
    SOME,
    TWO,
    all_checks,
    compiled_checks,
    four_checks,
    options_of,
)
from support.training import (
    LENGTHS,
    MODEL,
    ROWS,
    assert_alike,
    build,
    digest,
    micro_batches,
    two_steps,
    watched,
)

from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.estimate.memory import memory_of_step
from olm_train.model.decoder import build_decoder
from olm_train.model.loss_config import LossConfig
from olm_train.model.shards import CUT_TENSORS
from olm_train.parallel.config import TensorParallelConfig
from olm_train.parallel.mesh import Mesh
from olm_train.parallel.tensor import require_cuttable

pytestmark = pytest.mark.xdist_group("tensor")  # its fixtures are made once
Ranks = list[dict[Any, Any]]
QUICK = ["muon"]


@pytest.fixture(scope="module")
def four() -> Ranks:
    return run_ranks(four_checks, 4)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    if request.param == 4:
        return request.getfixturevalue("four")
    return run_ranks(all_checks, 2, SOME, QUICK)


def follow(ranks: Ranks, key: object, case: dict[str, Any]) -> None:
    options, _, parts = options_of(**case)
    module = build(**options)
    share = [ROWS] if parts == 1 else [1, ROWS - 1]
    expected = two_steps(module, share)
    batches = [make_batch([LENGTHS[row]], vocab_size=8, seed=row) for row in range(4)]
    for number, rank in enumerate(ranks):
        run, evaluated = rank[key]
        assert_alike(run, expected, key)
        assert digest(run.weights) == digest(ranks[0][key][0].weights)
        alone = module.eval_losses(batches[number])
        for found in evaluated[:2]:
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-4)


def test_a_model_follows_one_rank(ranks: Ranks) -> None:
    """Loss, counts, balance and gradients, of routers too, are summed once over all tokens."""
    for name in TWO:
        if name in ranks[0]:
            follow(ranks, name, TWO[name])


@pytest.mark.slow
def test_so_do_all_models_on_two_ranks() -> None:
    rest = [name for name in TWO if name not in SOME]
    found = run_ranks(all_checks, 2, rest, [])
    for name in rest:
        follow(found, name, TWO[name])


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
def test_so_do_layouts_of_four_ranks(layout: str, four: Ranks) -> None:
    follow(four, ("layout", layout), FOUR[layout])


def test_every_optimizer_takes_the_steps_of_one_rank(ranks: Ranks) -> None:
    names = [key[1] for key in ranks[0] if key[0] == "optim"]
    assert {*names} >= {*QUICK}
    for name in names:
        expected = two_steps(build(model=TWO["experts"]["model"], optim=OPTIMS[name]), [ROWS])
        for rank in ranks:
            run = rank["optim", name]
            assert run.losses == pytest.approx(
                expected.losses, rel=1e-2 if name == "half" else 1e-4
            )
            assert digest(run.weights) == digest(ranks[0]["optim", name].weights)


def test_weights_after_muon_are_those_of_one_rank(ranks: Ranks) -> None:
    expected = two_steps(build(model=TWO["experts"]["model"], optim=MUON), [ROWS])
    for name, weight in expected.weights.items():
        found = ranks[0]["optim", "muon"].weights[name]
        torch.testing.assert_close(found, weight, rtol=1e-3, atol=2e-4)


def test_different_rows_on_ranks_that_share_them_are_refused(ranks: Ranks) -> None:
    for rank in ranks:
        assert "ranks 0 and 1 share micro-batches, and were given different rows" in rank["refused"]


def test_losses_of_labels_are_shown_as_on_one_rank(ranks: Ranks) -> None:
    ((_, labels, losses),) = watched(build(model=BASE), micro_batches(1, [ROWS], World()))
    expected = losses.view_as(labels)
    for number, rank in enumerate(ranks):
        readers = len(ranks) // 2
        share = ROWS // readers
        first = number // 2 * share
        ((_, labels, losses),) = rank["seen"]
        torch.testing.assert_close(losses.view_as(labels), expected[first : first + share])


def test_memory_is_counted_as_it_is_held(ranks: Ranks) -> None:
    model = TWO["experts"]["model"]
    memory, whole = (
        memory_of_step(
            model,
            replace(build(model=model).config, tp_config=tp),
            sequence_length=32,
            world_size=len(ranks),
        )
        for tp in (TensorParallelConfig(degree=2), None)
    )
    held = ranks[0]["held"]
    assert {name for name in held if f".{name}".endswith(CUT_TENSORS)} == ranks[0]["cut"]
    assert held["blocks.0.attention.w_out.weight"] == (32 * 2 // len(ranks), 16)
    assert held["blocks.0.feed_forward.router.weight"][1] == 32
    assert memory.weights == 4 * sum(map(math.prod, held.values()))
    assert memory.logits == whole.logits // 2
    assert memory.activations < 0.6 * whole.activations
    assert memory.gathered < whole.gathered


@pytest.mark.slow
def test_compiled_blocks_follow_one_rank() -> None:
    expected = two_steps(build(model=BASE), [ROWS]).losses
    for found in run_ranks(compiled_checks, 2):
        assert found == pytest.approx(expected, rel=1e-5)


# ---- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({}, 8, "8 does not divide the 4 query heads.*set it to 4"),
        ({"n_heads": 6, "n_kv_heads": 2, "head_dim": 8}, 3, "neither divides.*one of 2, 6"),
        ({"n_heads": 8, "n_kv_heads": 1, "head_dim": 4}, 8, "8 does not divide the 4 entries"),
        ({"feed_forward": {"hidden_size": 50}}, 4, "the 50 hidden units.*set it to 2 or 5"),
        ({"vocab_multiple": 1}, 2, "(?s)97 rows of the embedding table.*2 or a multiple"),
        ({"feed_forward": of_experts(**BALANCES["sequence_aux"]).feed_forward}, 2, "sequence_aux"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut_are_refused_with_what_can(
    change: dict[str, Any], tp: int, message: str
) -> None:
    model = build_decoder(BASE.changed(**change), device="meta")
    choice = LossConfig().choose(model.config, microbatch=32, compiling=False)
    with pytest.raises(UsageError, match=f"(?s){message}"):
        require_cuttable(model, choice, Mesh(tp=tp))


def test_what_needs_all_logits_or_other_attention_is_refused_by_name() -> None:
    model = build_decoder(MODEL.changed(vocab_multiple=1, vocab_size=96), device="meta")
    choice = LossConfig(name="linear_cross_entropy").choose(
        model.config, microbatch=32, compiling=False
    )
    with pytest.raises(UsageError, match="linear_cross_entropy wants all logits"):
        require_cuttable(model, choice, Mesh(tp=2))
    plain = LossConfig().choose(model.config, microbatch=32, compiling=False)
    model.blocks[1].attention = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(UsageError, match="attention by Linear"):
        require_cuttable(model, plain, Mesh(tp=2))
