"""Pipelines: which layers a stage has, schedules, and steps over several ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
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
from support.training import (
    LENGTHS,
    MODEL,
    ROWS,
    Run,
    assert_alike,
    build,
    load,
    save,
    train,
    watched,
)

from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.estimate.flops import document_pairs, num_flops_per_token
from olm_train.estimate.memory import TrainingTensors, memory_of_step
from olm_train.model.decoder import build_decoder
from olm_train.model.head import HeadConfig
from olm_train.optim.adamw import AdamWConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.config import DataParallelConfig, PipelineParallelConfig
from olm_train.parallel.mesh import Mesh
from olm_train.parallel.pipeline import require_stages
from olm_train.parallel.stages import (
    DOCUMENT,
    TIMES,
    Timeline,
    fits,
    layer_flops,
    require_micro_batches,
    shares,
    spans,
    split,
)

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


SCHEDULES = st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "dualpipev"])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_no_other_split_has_a_cheaper_costliest_stage(
    costs: list[int], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = split(costs, stages)
    assert [layer for span in found for layer in span] == [*range(len(costs))]
    assert len(found) == stages
    assert all(found)
    ways = combinations(range(1, len(costs)), stages - 1)
    least = min(
        max(sum(costs[a:b]) for a, b in zip((0, *way), (*way, len(costs)), strict=True))
        for way in ways
    )
    assert max(sum(costs[layer] for layer in span) for span in found) == least


def test_the_costs_of_layers_and_head_are_all_flops_of_a_token() -> None:
    model = replace(MODEL, n_layers=6)
    pairs = document_pairs(model, DOCUMENT) / DOCUMENT
    whole = num_flops_per_token(model, pairs_per_token=pairs)
    assert sum(layer_flops(model)) == pytest.approx(whole, rel=1e-3)
    assert layer_flops(model)[-1] > layer_flops(model)[0]
    config = PipelineParallelConfig(degree=2)
    assert sum(shares(config, model)) == pytest.approx(1)


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers() -> None:
    model = replace(MODEL, n_layers=12, vocab_size=20_000)
    layers = [len(span) for span in spans(PipelineParallelConfig(degree=2), model)]
    assert layers[1] < layers[0]


@given(SCHEDULES, st.integers(2, 4), st.integers(1, 9))
def test_every_action_comes_once_and_after_what_it_needs(
    schedule: Any, degree: int, number: int
) -> None:
    config = PipelineParallelConfig(degree=degree, schedule=schedule)
    timeline = Timeline(config, number)
    assume(fits(config, number))
    actions = timeline.actions
    begin = {}
    for rank, (begins, each) in enumerate(zip(timeline.begins, actions, strict=True)):
        ends = [at + TIMES[action.kind] for at, action in zip(begins, each, strict=True)]
        assert all(end <= at for end, at in zip(ends, begins[1:], strict=False))
        for action, at, end in zip(each, begins, ends, strict=True):
            assert config.rank_of(action.stage) == rank
            kind = {"F": "F", "W": "W"}.get(action.kind, "B")
            assert (kind, action.stage, action.number) not in begin
            begin[kind, action.stage, action.number] = at, end
    for stage in range(config.stages):
        for n in range(number):
            forward, backward = begin["F", stage, n], begin["B", stage, n]
            assert forward[1] <= backward[0]
            if stage:
                assert begin["F", stage - 1, n][1] <= forward[0]
                assert backward[1] <= begin["B", stage - 1, n][0]
            assert begin.get(("W", stage, n), backward)[0] >= backward[0]
    assert 0 <= timeline.bubble < 1


def test_bubbles_are_those_of_the_papers() -> None:
    def bubble(schedule: Any, number: int = 8) -> float:
        return Timeline(PipelineParallelConfig(degree=4, schedule=schedule), number).bubble

    assert bubble("gpipe") == bubble("1f1b") == pytest.approx(3 / 11)
    assert bubble("interleaved_1f1b") == pytest.approx(3 / 19)
    assert bubble("zero_bubble") < bubble("interleaved_1f1b")
    assert bubble("1f1b", 32) < bubble("1f1b")


def test_a_picture_shows_ranks_and_time() -> None:
    assert Timeline(PipelineParallelConfig(degree=2), 2).picture() == [
        "rank 0: F0 F1       B0 --    B1 --",
        "rank 1:    F0 B0 -- F1 B1 --",
    ]


def test_layers_whose_activations_are_alive_are_counted() -> None:
    def alive(schedule: Any) -> list[int]:
        config = PipelineParallelConfig(degree=2, schedule=schedule)
        timeline = Timeline(config, 8)
        return [timeline.alive(rank, [3] * config.stages) for rank in range(2)]

    assert alive("gpipe") == [24, 24]
    assert alive("1f1b") == [6, 3]
    assert alive("zero_bubble") == [12, 12]


@pytest.mark.parametrize(
    ("schedule", "number", "fitting"),
    [("1f1b", 3, "have 4 of"), ("dualpipev", 7, "have 8 of"), ("interleaved_1f1b", 9, "8 or 10")],
)
def test_micro_batches_that_do_not_fit_are_refused_with_what_does(
    schedule: Any, number: int, fitting: str
) -> None:
    config = PipelineParallelConfig(degree=4, schedule=schedule)
    with pytest.raises(UsageError, match=fitting):
        require_micro_batches(config, number)


def test_split_points_that_make_no_stages_are_refused() -> None:
    for points, message in (([2, 1], "do not ascend"), ([1, 2], "2 split points make 3 stages")):
        with pytest.raises(UsageError, match=message):
            PipelineParallelConfig(degree=2, split_points=points)
    config = PipelineParallelConfig(degree=2, split_points=[2])
    with pytest.raises(UsageError, match="no layer: the model has 2"):
        spans(config, MODEL)
    with pytest.raises(UsageError, match="2 layers cannot be cut into 4 stages"):
        spans(PipelineParallelConfig(degree=2, schedule="zero_bubble"), MODEL)
    six = PipelineParallelConfig(
        degree=2, schedule="interleaved_1f1b", split_points=[1, 2, 3, 4, 5]
    )
    assert [six.rank_of(stage) for stage in range(six.stages)] == [0, 1] * 3


def test_a_model_that_cannot_be_cut_is_refused_with_a_reason() -> None:
    tied = build_decoder(replace(MODEL, head=HeadConfig(tied=True)), device="meta")
    with pytest.raises(UsageError, match="the head is the embedding table"):
        require_stages(PipelineParallelConfig(degree=2), tied)


def test_options_that_do_not_go_with_stages_are_refused() -> None:
    config = replace(build().config, pp_config=PipelineParallelConfig(degree=2))
    for dp, message in (
        (DataParallelConfig(name="ddp"), "ddp reduces gradients in the backward pass"),
        (DataParallelConfig(reduce_each_microbatch=True), "reduced once"),
    ):
        with pytest.raises(UsageError, match=message):
            replace(config, dp_config=dp).mesh(4)
    split_off = PipelineParallelConfig(degree=2, schedule="zero_bubble")
    config = replace(config, pp_config=split_off)
    config.check_schedule(2)
    with pytest.raises(UsageError, match="reshard_after_forward: true"):
        config.check_schedule(4)
    ops = ActivationCheckpointingConfig(mode="selected_ops")
    for change, message in (
        ({"compile_model": True}, "compile_model: true"),
        ({"ac_config": ops}, "mode: selected_ops"),
    ):
        with pytest.raises(UsageError, match=message):
            replace(config, **change).check_schedule(2)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.data())
def test_the_world_reads_what_the_mesh_says(
    pp: int, replicas: int, shards: int, cp: int, data: st.DataObject
) -> None:
    mesh = Mesh(pp=pp, dp_replicate=replicas, dp_shard=shards, cp=cp)
    rank = data.draw(st.integers(0, mesh.size - 1))
    world = World(rank=rank, size=mesh.size, sharers=cp, stages=pp)

    def reader(rank: int) -> int:
        at = mesh.coordinates(rank)
        return at["dp_replicate"] * mesh.dp_shard + at["dp_shard"]

    assert (world.reader, world.readers) == (reader(rank), mesh.readers)
    assert world.speaks == (mesh.group(rank, "pp", "cp")[0] == rank)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, mesh.size - 1)] * 2)))
    near = replace(world, neighbours=range(first, last + 1)).near_readers
    readers = {reader(other) for other in range(first, last + 1)}
    assert {*near} == readers if pp == 1 else {*near} >= readers
    assert world.near_readers is None


def test_copies_are_kept_on_the_machines_of_a_stage() -> None:
    hsdp = DataParallelConfig(name="hsdp")
    assert hsdp.mesh(16, 4, pp=2) == Mesh(pp=2, dp_replicate=2, dp_shard=4)
    assert hsdp.mesh(16, 2, pp=4) == Mesh(pp=4, dp_shard=4)


def test_memory_is_that_of_the_rank_that_needs_most() -> None:
    model = replace(MODEL, n_layers=8)
    config = build().config

    def memory(world_size: int, **options: Any) -> Any:
        module = replace(config, **options)
        return memory_of_step(
            model, module, sequence_length=32, world_size=world_size, micro_batches=4
        )

    alone = memory(1)
    cut = memory(2, pp_config=PipelineParallelConfig(degree=2, split_points=[4]))
    assert cut.weights == pytest.approx(alone.weights / 2, rel=0.01)
    assert cut.optimizer == pytest.approx(alone.optimizer / 2, rel=0.01)
    gpipe = memory(2, pp_config=PipelineParallelConfig(degree=2, schedule="gpipe"))
    assert gpipe.activations > 1.5 * cut.activations
    tensors = TrainingTensors.count(model, AdamWConfig())
    parts = [tensors.of_stages([span]).parameters for span in (range(4), range(4, 8))]
    assert {**parts[0], **parts[1]} == tensors.parameters
    assert not parts[0].keys() & parts[1].keys()
