"""Layers cut over ranks: one rank's bits at first, its losses, gradients, norms and checkpoints.

All checks of two ranks run in one launch, those of four in another (support/pipeline_ranks.py);
which stage has what, and when a rank does what: test_stages.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.pipeline_ranks import (
    DENSE,
    EXPERTS,
    LAYOUTS,
    NAMED,
    QUICK,
    SCHEDULES,
    Trained,
    evaluated,
    four_checks,
    load,
    save,
    slow_checks,
    steps,
    two_checks,
    weights,
)
from support.training import LENGTHS, build

pytestmark = pytest.mark.xdist_group("pipeline")  # its fixtures are made once

Ranks = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def single() -> Trained:
    return steps(build(model=DENSE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    module = build(model=DENSE)
    steps(module, (1, 2))
    save(module, path / "one")
    return path


@pytest.fixture(scope="module")
def two(folder: Path) -> Ranks:
    found: Ranks = run_ranks(two_checks, 2, str(folder))
    return found


@pytest.fixture(scope="module")
def four(folder: Path) -> Ranks:
    found: Ranks = run_ranks(four_checks, 4, str(folder))
    return found


@pytest.fixture(scope="module")
def slow() -> Ranks:
    found: Ranks = run_ranks(slow_checks, 2)
    return found


def assert_alike(run: Trained, expected: Trained, rel: float = 1e-6) -> None:
    assert run.initial == expected.initial
    assert run.losses == pytest.approx(expected.losses, rel=rel)
    assert run.norms == pytest.approx(expected.norms, rel=rel)
    assert run.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        far = (run.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert far <= max(rel, 1e-5), name
    assert run.metrics == pytest.approx(expected.metrics, rel=max(10 * rel, 1e-4))


@pytest.mark.parametrize("schedule", ["zero_bubble", *QUICK])
def test_every_schedule_follows_one_rank(schedule: str, single: Trained, two: Ranks) -> None:
    """Gradients are of the mean over labels: not too large by their number (torchtitan #2972). What
    was evaluated before the first step, with zero_bubble, has changed nothing."""
    for rank in two:
        assert_alike(rank[schedule], single)
    assert sum(rank[schedule].held for rank in two) == single.held


def test_so_do_experts_whose_balance_is_that_of_a_step(two: Ranks) -> None:
    expected = steps(build(model=EXPERTS["global_aux"]))
    for rank in two:
        assert_alike(rank["global_aux"], expected)


def test_a_run_goes_on_to_the_bit_and_from_and_on_one_rank(two: Ranks, folder: Path) -> None:
    goes_on(two, folder)


@pytest.mark.slow
def test_a_run_of_four_ranks_goes_on_to_the_bit_and_in_other_layouts(
    four: Ranks, folder: Path
) -> None:
    goes_on(four, folder)
    for rank in four:
        assert rank["to fsdp"] == pytest.approx(rank["resumed"]["rest"], rel=1e-6)


def goes_on(ranks: Ranks, folder: Path) -> None:
    module = load(build(model=DENSE), folder / "one")
    names = dict(module.model.named_parameters())
    saved, expected = weights(module), steps(module, (3, 4)).losses
    for rank in ranks:
        found = rank["resumed"]
        assert found["same"]
        assert found["loaded"] == found["given"] == saved
        assert {*found["values"]} == {f"optim.{name}.calls" for name in names}
        assert found["losses"] == pytest.approx(expected, rel=1e-6)
    alone = steps(load(build(model=DENSE), folder / f"pp{len(ranks)}"), (3, 4)).losses
    assert alone == pytest.approx(ranks[0]["resumed"]["rest"], rel=1e-6)


def test_each_rank_gets_the_losses_of_its_own_evaluation_batch(two: Ranks) -> None:
    for rank, lengths in zip(two, (LENGTHS[2:5], LENGTHS[:2]), strict=True):
        total, losses = evaluated(build(model=DENSE), lengths)
        found, theirs = rank["evaluated"]
        assert found == pytest.approx(total, rel=1e-6)
        for own, expected in zip(theirs, losses, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_losses_of_labels_are_shown_on_every_rank_as_on_one(two: Ranks) -> None:
    module, expected = build(model=DENSE), list[Any]()
    module.watch_losses = lambda batch, by_label: expected.append((batch.rows, by_label))
    steps(module, (1,))
    for rank in two:
        for (rows, losses), (row, loss) in zip(rank["seen"], expected, strict=True):
            assert torch.equal(rows, row)
            torch.testing.assert_close(losses, loss)


def test_a_step_that_one_stage_cannot_take_is_left_out_by_all(two: Ranks) -> None:
    assert len({rank["non-finite"]["loss"] for rank in two}) == 1
    for rank in two:
        assert rank["non-finite"]["bad"] == 1
        assert rank["non-finite"]["unchanged"]
        assert rank["non-finite"]["loss"] > 0


def test_steps_that_do_not_fit_are_refused_with_what_does(two: Ranks) -> None:
    for rank in two:
        assert "1f1b cannot take 1 micro-batch a step over 2 stages" in rank["refused"]["few"]
        assert "let a step have 2 of them" in rank["refused"]["few"]
        assert "shapes (1, 32), (7, 32)" in rank["refused"]["uneven"]
        assert "ranks 0 and 1 share micro-batches" in rank["refused"]["rows"]


def test_a_rank_that_does_not_come_is_named(two: Ranks) -> None:
    assert "rank 0 timed out waiting for other ranks" in two[0]["lost"]
    assert "silent: rank 1" in two[0]["lost"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_four_ranks_follows_one(layout: str, single: Trained, four: Ranks) -> None:
    for rank in four:
        assert_alike(rank[layout], single)


@pytest.mark.slow
@pytest.mark.parametrize("balance", EXPERTS)
def test_so_do_cut_and_dealt_experts(balance: str, four: Ranks) -> None:
    expected = steps(build(model=EXPERTS[balance]))
    for rank in four:
        assert_alike(rank["experts", balance], expected)
        if balance == "sequence_aux":
            assert_alike(rank["dealt"], expected)


@pytest.mark.slow
def test_matrices_are_orthogonalised_by_the_ranks_of_their_stage(four: Ranks) -> None:
    expected = steps(build(model=DENSE, optim=NAMED["muon"]))
    for rank in four:
        assert_alike(rank["muon"], expected, rel=1e-5)


@pytest.mark.slow
def test_looped_stages_of_four_ranks_evaluate_as_one(four: Ranks) -> None:
    total, _ = evaluated(build(model=DENSE), LENGTHS[:2])
    for rank in four:
        assert rank["evaluated"][0] == pytest.approx(total, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("optim", NAMED)
def test_every_optimizer_takes_the_steps_of_one_rank(optim: str, slow: Ranks) -> None:
    expected = steps(build(model=DENSE, optim=NAMED[optim]))
    for rank in slow:
        assert_alike(rank["optim", optim], expected, rel=1e-2 if optim == "half" else 1e-4)
        assert rank["optim", optim].norms == slow[0]["optim", optim].norms


@pytest.mark.slow
@pytest.mark.parametrize("balance", EXPERTS)
@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_experts_follow_one_rank_in_every_schedule(
    schedule: str, balance: str, slow: Ranks
) -> None:
    expected = steps(build(model=EXPERTS[balance]))
    for rank in slow:
        assert_alike(rank["experts", balance, schedule], expected)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["gpipe of few", "zero bubble of few"])
def test_fewer_micro_batches_than_stages_follow_one_rank(which: str, slow: Ranks) -> None:
    expected = steps(build(model=DENSE), rows=8)
    for rank in slow:
        assert_alike(rank[which], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    [
        "gpipe",
        "split",
        "a decoder",
        *(("recomputed", mode) for mode in ("full", "selected_ops", "dualpipev")),
    ],
)
def test_recomputed_blocks_and_a_split_or_model_of_ones_own_follow_one_rank(
    which: Any, single: Trained, slow: Ranks
) -> None:
    for rank in slow:
        assert_alike(rank[which], single)


@pytest.mark.slow
def test_compiled_blocks_follow_one_rank(single: Trained, slow: Ranks) -> None:
    for rank in slow:
        assert rank["compiled"].losses == pytest.approx(single.losses, rel=1e-5)
