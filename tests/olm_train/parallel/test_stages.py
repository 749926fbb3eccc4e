"""Which layers a stage has, and what the ranks of a pipeline do when; numbers alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.training import MODEL, build

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
