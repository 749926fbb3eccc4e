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
    EVEN,
    FOUR,
    NAMED,
    SLOW,
    TWO,
    batches,
    evaluated,
    four_checks,
    of_case,
    slow_checks,
    steps,
    two_checks,
)
from support.training import LENGTHS, ROWS, Run, assert_alike, build, load, save, train, watched

pytestmark = pytest.mark.xdist_group("pipeline")  # its fixtures are made once

Ranks = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def single() -> Run:
    return steps(build(model=DENSE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    module = build(model=DENSE)
    train(module, [1] * ROWS, (1, 2))
    save(module, path / "one")
    return path


@pytest.fixture(scope="module")
def two(folder: Path) -> Ranks:
    return run_ranks(two_checks, 2, str(folder))


@pytest.fixture(scope="module")
def four() -> Ranks:
    return run_ranks(four_checks, 4)


@pytest.fixture(scope="module")
def slow() -> Ranks:
    return run_ranks(slow_checks, 2)


@pytest.mark.parametrize("which", ["zero_bubble", *TWO])
def test_every_schedule_follows_one_rank_and_so_do_experts(which: str, two: Ranks) -> None:
    """Gradients are of the mean over labels: not too large by their number (torchtitan #2972). What
    was evaluated before the first step, with zero_bubble, has changed nothing."""
    expected = of_case(which, TWO.get(which, ({}, {})), 1)
    for rank in two:
        assert_alike(rank[which], expected)


def test_a_rank_has_the_layers_of_its_stages_alone(single: Run, two: Ranks) -> None:
    held = sorted(name for rank in two for name in rank["held"])
    assert held == sorted(single.gradients)


def test_looped_stages_go_on_to_the_bit_and_from_one_rank(two: Ranks, folder: Path) -> None:
    module = load(build(model=DENSE), folder / "one")
    expected = train(module, [1] * ROWS, (3, 4))
    for rank in two:
        found = rank["resumed"]
        assert found["same"]
        assert found["given"]
        names = dict(module.model.named_parameters())
        assert {*found["values"]} == {f"optim.{name}.calls" for name in names}
        assert_alike(found["from one"], expected)


def test_each_rank_gets_the_losses_of_its_own_evaluation_batch(two: Ranks) -> None:
    for rank, lengths in zip(two, (LENGTHS[2:5], LENGTHS[:2]), strict=True):
        total, losses = evaluated(build(model=DENSE), lengths)
        found, theirs = rank["evaluated"]
        assert found == pytest.approx(total, rel=1e-6)
        for own, expected in zip(theirs, losses, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_losses_of_labels_are_shown_on_every_rank_as_on_one(two: Ranks) -> None:
    module = build(model=DENSE)
    expected = watched(module, batches(module, 1))
    for rank in two:
        for (rows, _, losses), (row, _, loss) in zip(rank["seen"], expected, strict=True):
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
@pytest.mark.parametrize("which", FOUR)
def test_every_layout_of_four_ranks_follows_one(which: str, four: Ranks) -> None:
    expected = of_case(which, FOUR[which], 1)
    for rank in four:
        assert_alike(rank[which], expected, rel=1e-5 if which == "matrices" else 1e-6)


@pytest.mark.slow
def test_looped_stages_of_four_ranks_evaluate_as_one(four: Ranks) -> None:
    total, _ = evaluated(build(model=DENSE), LENGTHS[:2])
    for rank in four:
        assert rank["evaluated"][0] == pytest.approx(total, rel=1e-6)


@pytest.mark.slow
def test_so_do_stages_whose_matrices_are_cut(four: Ranks) -> None:
    """Loss and gradients, evaluation of each rank's own batch, and losses of labels."""
    module = build(model=EVEN)
    own = [evaluated(module, LENGTHS[number : number + 2]) for number in range(4)]
    expected, shown = steps(module), watched(module, batches(module, 1))
    for rank, (total, losses) in zip(four, own, strict=True):
        assert_alike(rank["cut"], expected)
        assert rank["cut, evaluated"][0] == pytest.approx(total, rel=1e-6)
        for found, alone in zip(rank["cut, evaluated"][1], losses, strict=True):
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
        for (rows, _, found), (row, _, alone) in zip(rank["cut, seen"], shown, strict=True):
            assert torch.equal(rows, row)
            torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("which", [*SLOW, "a decoder"])
def test_more_of_two_ranks_follows_one_rank(which: str, slow: Ranks) -> None:
    expected = of_case(which, SLOW.get(which, ({}, {})), 1)
    rel = 1e-2 if which == "half" else 1e-4 if which in NAMED else 1e-6
    for rank in slow:
        assert_alike(rank[which], expected, rel=rel)
        assert rank[which].norms == slow[0][which].norms


@pytest.mark.slow
def test_compiled_blocks_follow_one_rank(single: Run, slow: Ranks) -> None:
    for rank in slow:
        assert rank["compiled"].losses == pytest.approx(single.losses, rel=1e-5)
