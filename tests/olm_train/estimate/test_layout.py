"""parallel: auto over all axes: what is chosen fits, and nothing simpler does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expert_ranks import of_experts
from support.runs import config_values
from support.training import MODEL, build

from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.estimate.layout import SharedRun, choose, require_layout
from olm_train.estimate.memory import TrainingTensors, memory_of_step
from olm_train.estimate.sharding import ROOM, Goal, Machine, candidates, need_of_decoder
from olm_train.model.decoder import build_decoder
from olm_train.parallel.config import (
    ContextParallelConfig,
    DataParallelConfig,
    DataParallelType,
    ExpertParallelConfig,
    PipelineParallelConfig,
    TensorParallelConfig,
)
from olm_train.parallel.float8 import Float8Config
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe
from olm_train.train_module_config import TransformerTrainModuleConfig

DENSE = MODEL.changed(vocab_size=96, n_layers=4)
EXPERTS = of_experts().changed(vocab_multiple=2)
MODULE = replace(build().config, rank_microbatch_size=256)
KINDS: dict[str, Any] = {
    "tp": TensorParallelConfig,
    "cp": ContextParallelConfig,
    "pp": PipelineParallelConfig,
    "ep": ExpertParallelConfig,
}
CP = ContextParallelConfig(degree=2)
GOALS = st.sampled_from(list(Goal))


def degrees_of(module: TransformerTrainModuleConfig) -> dict[str, int]:
    found = {axis: getattr(module, f"{axis}_config") for axis in KINDS}
    return {axis: config.degree for axis, config in found.items() if config is not None}


def run_of(model: Any, module: Any, ranks: int, nodes: int = 1, memory: int = 1) -> SharedRun:
    machine = Machine(world_size=ranks, nodes=nodes, memory=memory)
    return SharedRun(model, module, machine, [256], lambda readers: [64 // readers])


def chosen(goal: Goal, run: SharedRun) -> tuple[TransformerTrainModuleConfig, str]:
    module, why = choose(
        goal,
        run.model,
        run.module,
        run.machine,
        sequence_lengths=run.sequence_lengths,
        micro_batches=run.micro_batches,
    )
    return module, "\n".join(why)


def needs(run: SharedRun, axes: int) -> list[int]:
    """Bytes of every layout of so many axes, by degrees that are tried one after another."""
    machine, tensors = run.machine, TrainingTensors.count(run.model, run.module.optim)
    decoder, found = build_decoder(run.model, device="meta"), []
    for degrees in product((1, 2, 4, 8), repeat=len(KINDS)):
        given = {
            f"{axis}_config": kind(degree=degree)
            for (axis, kind), degree in zip(KINDS.items(), degrees, strict=True)
            if degree > 1
        }
        if len(given) != axes or machine.world_size // machine.nodes % degrees[0]:
            continue
        ulysses = {"cp_config": replace(CP, degree=max(2, degrees[1]), exchange="ulysses")}
        for options in (given, given | ulysses) if degrees[1] > 1 else (given,):
            if {*options} & {f"{axis}_config" for axis in degrees_of(run.module)}:
                continue
            try:
                module = replace(run.module, **options)
                readers = module.mesh(machine.world_size, machine.nodes).readers
            except UsageError:
                continue
            for _, dp in candidates(
                machine, module.dp_config, sharers=module.sharers, dealt=module.parted,
                accumulates=64 // readers > 1,
            ):  # fmt: skip
                way = replace(module, dp_config=dp)
                try:
                    require_layout(
                        way, decoder, machine.world_size, machine.nodes, run.micro_batches
                    )
                except UsageError:
                    continue
                if not dp.cpu_offload:
                    found.append(memory_of_step(
                        run.model, way, sequence_length=256, world_size=machine.world_size,
                        nodes=machine.nodes, micro_batches=64 // readers, counted=tensors,
                    ).total)  # fmt: skip
    return found


@settings(max_examples=8)
@given(
    GOALS,
    st.sampled_from([DENSE, EXPERTS]),
    st.sampled_from([(2, 1), (4, 1), (4, 2), (8, 2)]),
    st.integers(500_000, 6_000_000),
    st.sampled_from([None, CP]),
)
def test_what_is_chosen_fits_and_nothing_simpler_does(
    goal: Goal, model: Any, world: tuple[int, int], memory: int, cp: Any
) -> None:
    module = replace(MODULE, cp_config=cp)
    run = run_of(model, module, *world, memory)
    room, (found, why) = run.machine.room(goal), chosen(goal, run)
    assert chosen(goal, run) == (found, why)
    assert why.count("<- chosen") == 1
    ranks, nodes = world
    require_layout(found, build_decoder(model, device="meta"), ranks, nodes, run.micro_batches)
    degrees = degrees_of(found)
    assert ranks // nodes % degrees.get("tp", 1) == 0
    assert cp is None or found.cp_config == cp
    none: dict[str, Any] = {f"{axis}_config": None for axis in KINDS} | {"cp_config": cp}
    assert replace(found, **none, dp_config=module.dp_config) == module
    more = len(degrees) - len(degrees_of(module))
    count = run.micro_batches(found.mesh(ranks, nodes).readers)[0]
    need = memory_of_step(
        model, found, sequence_length=256, world_size=ranks, nodes=nodes, micro_batches=count
    ).total
    assert (need <= room) != ("nothing fits" in why)
    if need > room or found.dp_config.cpu_offload:
        more = 1 + len(run.free)
    for axes in range(more):
        assert min(needs(run, axes), default=room + 1) > room, axes
    if 0 < more <= len(run.free):
        fit = [way for way in run.layouts(more, room)[0] if way.need <= room]
        if goal is Goal.memory:
            assert need == min(needs(run, more))
        else:
            assert run.seconds(found) == min(run.seconds(way.config) for way in fit)


def test_of_layouts_that_fit_in_a_machine_tensor_parallelism_stays_there() -> None:
    module = replace(MODULE, tp_config=TensorParallelConfig(degree=4))
    near, far = (run_of(DENSE, module, 8, nodes).seconds(module) for nodes in (2, 8))
    assert far > 2 * near


def test_a_bubble_takes_time() -> None:
    module = replace(MODULE, pp_config=PipelineParallelConfig(degree=4))
    model = DENSE.changed(d_model=4096, n_heads=32, n_kv_heads=32)
    run = run_of(model, module, 4)
    few, many = (
        replace(run, micro_batches=lambda readers, n=n: [n]).seconds(module) / n for n in (4, 64)
    )
    assert few > 1.5 * many


def test_a_pipeline_of_many_micro_batches_takes_the_time_of_its_share_of_the_layers() -> None:
    model = DENSE.changed(d_model=4096, n_heads=32, n_kv_heads=32)
    run = replace(run_of(model, MODULE, 4), micro_batches=lambda readers: [4096 // readers])
    staged = replace(MODULE, pp_config=PipelineParallelConfig(degree=4))
    alone = replace(run, machine=Machine(world_size=1, nodes=1, memory=1))
    assert run.seconds(staged) == pytest.approx(alone.seconds(MODULE) / 4, rel=0.2)


def test_each_layout_is_one_that_ranks_can_have() -> None:
    run = run_of(DENSE, MODULE, 8, 2)
    found = [way.config for way in run.layouts(1, 0)[0]]
    assert all(each.dp_config.shards for each in found if each.pp_config)
    assert any(each.pp_config for each in found)
    assert run.layouts(1, 0)[1]["pp"] == "4 layers cannot be cut into 8 stages"
    narrow = run_of(DENSE, MODULE, 8, 4)
    assert {
        way.config.tp_config.degree for way in narrow.layouts(1, 0)[0] if way.config.tp_config
    } == {2}
    odd = replace(run, sequence_lengths=[256, 255])
    assert not any(way.config.tp_config for way in odd.layouts(1, 0)[0])
    few = replace(run, micro_batches=lambda readers: [3])
    assert {
        way.config.pp_config.degree for way in few.layouts(1, 0)[0] if way.config.pp_config
    } == {2}


def test_axes_that_are_set_or_of_no_use_stay_as_they_are() -> None:
    assert run_of(DENSE, replace(MODULE, cp_config=CP), 4).free == ["tp", "pp"]
    assert run_of(EXPERTS, MODULE, 4).free == ["tp", "cp", "pp", "ep"]


def test_where_all_fits_the_way_of_least_exchange_is_taken_and_else_that_of_least_memory() -> None:
    run = run_of(DENSE, MODULE, 8, 2)
    for way in run.layouts(1, 10**12)[0]:
        assert way.config == run.ways(replace(way.config, dp_config=MODULE.dp_config))[0].config
    for way in run.layouts(1, 0)[0]:
        ways = run.ways(replace(way.config, dp_config=MODULE.dp_config))
        assert way.need == min(each.need for each in ways if not each.offloaded)


def test_the_longest_rows_count() -> None:
    run = run_of(DENSE, MODULE, 4)
    several = replace(run, sequence_lengths=[64, 256])
    assert several.seconds(MODULE) == run.seconds(MODULE)
    assert (
        several.ways(MODULE) == run.ways(MODULE) != replace(run, sequence_lengths=[64]).ways(MODULE)
    )


def test_what_refuses_axes_is_said() -> None:
    run = run_of(MODEL, MODULE, 2, 1, 1000)
    _, why = chosen(Goal.auto, run)
    assert "refused: tp: degree 2 does not divide the 97 rows of the embedding table" in why
    assert "warning: nothing fits" in why
    run = run_of(DENSE, replace(MODULE, float8_config=Float8Config(ao_recipe="mxfp8")), 2, 1, 1000)
    assert "refused: tp: tp_config does not go with ao_recipe: mxfp8" in chosen(Goal.auto, run)[1]


def test_stages_that_the_user_set_are_kept_and_the_weights_shared_among_the_ranks_of_one() -> None:
    module = replace(MODULE, pp_config=PipelineParallelConfig(degree=2))
    found, why = chosen(Goal.auto, run_of(DENSE, module, 8, 2, 10**9))
    assert found.pp_config == module.pp_config
    assert found.dp_config.shards
    assert "fsdp: cut over all ranks, kept from forward to backward" in why
    with pytest.raises(UsageError, match="degree 3 does not divide"):
        chosen(Goal.auto, run_of(DENSE, replace(MODULE, pp_config=KINDS["pp"](degree=3)), 8))


SMALL = build().config


def shared(goal: Goal, machine: Machine, micro_batches: int = 1) -> tuple[DataParallelConfig, str]:
    module, why = choose(
        goal,
        MODEL,
        SMALL,
        machine,
        sequence_lengths=[32],
        micro_batches=lambda readers: [micro_batches],
    )
    return module.dp_config, "\n".join(why)


def test_one_rank_has_nothing_to_share() -> None:
    config, why = shared(Goal.auto, Machine(world_size=1, nodes=1, memory=1))
    assert config == SMALL.dp_config
    assert "nothing to share" in why


def test_less_memory_asks_for_more_exchange_step_by_step() -> None:
    names: list[str] = []
    for memory in (10**7, 500_000):
        config, _ = shared(Goal.speed, Machine(world_size=8, nodes=2, memory=memory))
        name = f"{config.name} {config.reshard_after_forward} {config.cpu_offload}"
        if name not in names:
            names.append(name)
    assert names == ["ddp True False", "hsdp False False"]
    assert shared(Goal.speed, Machine(world_size=3, nodes=1, memory=10**5))[0].cpu_offload


def test_memory_takes_the_least_that_stays_on_the_device_and_auto_leaves_more_room() -> None:
    roomy = Machine(world_size=8, nodes=2, memory=10**9)
    config, _ = shared(Goal.memory, roomy)
    assert (config.name, config.cpu_offload) == ("fsdp", False)
    ddp = replace(SMALL, dp_config=DataParallelConfig(name="ddp"))  # type: ignore[arg-type]
    whole = memory_of_step(MODEL, ddp, sequence_length=32, world_size=8, nodes=2).total
    tight = replace(roomy, memory=round(whole / 0.8))
    assert shared(Goal.speed, tight)[0].name == "ddp"
    assert shared(Goal.auto, tight)[0].name == "hsdp"


def test_gradients_that_are_accumulated_are_counted_whole() -> None:
    module = replace(SMALL, dp_config=DataParallelConfig())
    sizes = [
        memory_of_step(MODEL, module, sequence_length=32, world_size=4, micro_batches=n).gradients
        for n in (1, 2)
    ]
    assert sizes[1] == 4 * MODEL.num_params > 3.5 * sizes[0]
    each = replace(SMALL, dp_config=DataParallelConfig(reduce_each_microbatch=True))
    found = memory_of_step(MODEL, each, sequence_length=32, world_size=4, micro_batches=2)
    assert found.gradients == sizes[0]


def test_gradients_are_reduced_at_each_micro_batch_where_whole_ones_do_not_fit() -> None:
    def taken(memory: int, micro_batches: int) -> DataParallelConfig:
        machine = Machine(world_size=8, nodes=1, memory=memory)
        return shared(Goal.speed, machine, micro_batches)[0]

    dp_config = replace(SMALL.dp_config, prefetch_factor=1, reduce_each_microbatch=True)
    each = replace(SMALL, dp_config=dp_config)
    need = memory_of_step(MODEL, each, sequence_length=32, world_size=8, micro_batches=2).total
    assert taken(round(need / ROOM[Goal.speed]) + 1, 2) == each.dp_config
    assert not taken(round(need / ROOM[Goal.speed]) + 1, 1).reduce_each_microbatch
    assert not taken(10**9, 2).reduce_each_microbatch


def test_a_run_takes_the_choice_and_a_dry_run_explains_it(tiny_mixture: Path) -> None:
    values = Values(config_values(tiny_mixture, tiny_mixture.parent / "run"))
    values.override("--parallel=speed")
    values.override("--train_module.rank_microbatch_size=64")
    values.override("--train_module.dp_config.param_dtype=bfloat16")
    config = RunConfig.resolve(values)
    fitted, why = config.fitted(Machine(world_size=4, nodes=2, memory=10**9))
    assert fitted.parallel is None
    assert fitted.train_module.dp_config == DataParallelConfig(
        name="ddp",  # type: ignore[arg-type]
        param_dtype="bfloat16",
    )
    assert RunConfig.resolve(Values(fitted.as_dict())).fitted(Machine(
        world_size=1, nodes=1, memory=1
    )) == (fitted, [])  # fmt: skip
    assert "4 ranks on 2 machines, 1 GB each, 0.9 GB to plan with" in why[0]
    text = describe(config, 4, nodes=2)
    assert "parallel: speed: 4 ranks on 2 machines, 80 GB each" in text
    assert "name: ddp" in text


def test_a_field_that_parallel_chooses_is_refused_beside_it(tiny_mixture: Path) -> None:
    values = Values(config_values(tiny_mixture, tiny_mixture.parent / "run"))
    values.override("--parallel=auto")
    values.override("--train_module.dp_config.name=fsdp")
    with pytest.raises(UsageError) as refusal:
        RunConfig.resolve(values)
    assert "chosen by parallel: auto" in str(refusal.value)
    assert "--train_module.dp_config.name" in str(refusal.value)


def test_the_need_of_a_decoder_falls_with_shards_and_grows_with_the_micro_batch() -> None:
    def need(ranks: int, name: str, rows: int = 1) -> int:
        module = replace(SMALL, rank_microbatch_size=rows * 32)
        machine = Machine(world_size=ranks, nodes=1, memory=1)
        found = need_of_decoder(MODEL, module, machine, sequence_length=32, micro_batches=1)
        return found(DataParallelConfig(name=DataParallelType(name)))

    assert need(1, "fsdp") == need(4, "ddp") > need(4, "fsdp")
    assert need(1, "ddp", rows=8) > need(1, "ddp") > 16 * MODEL.num_params


def test_the_tensors_of_a_model_are_counted_once_for_all_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[object] = []
    count = TrainingTensors.count

    def counted(*given: Any) -> TrainingTensors:
        counts.append(given)
        return count(*given)

    monkeypatch.setattr(TrainingTensors, "count", counted)
    shared(Goal.memory, Machine(world_size=4, nodes=1, memory=1))  # nothing fits: all are asked
    assert len(counts) == 1
