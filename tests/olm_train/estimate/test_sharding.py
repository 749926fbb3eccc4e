"""parallel: auto | speed | memory: the first that fits, with the reason; nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import config_values
from support.training import MODEL, build

from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.estimate.layout import choose
from olm_train.estimate.memory import TrainingTensors, memory_of_step
from olm_train.estimate.sharding import ROOM, Goal, Machine, need_of_decoder
from olm_train.parallel.config import DataParallelConfig, DataParallelType
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe

MODULE = build().config


def need(config: DataParallelConfig, machine: Machine) -> int:
    return memory_of_step(
        MODEL,
        replace(MODULE, dp_config=config),
        sequence_length=32,
        world_size=machine.world_size,
        nodes=machine.nodes,
    ).total


def chosen(goal: Goal, machine: Machine) -> tuple[DataParallelConfig, str]:
    module, why = choose(
        goal, MODEL, MODULE, machine, sequence_lengths=[32], micro_batches=lambda readers: [1]
    )
    return module.dp_config, "\n".join(why)


def test_one_rank_has_nothing_to_share() -> None:
    config, why = chosen(Goal.auto, Machine(world_size=1, nodes=1, memory=1))
    assert config == MODULE.dp_config
    assert "nothing to share" in why


def test_less_memory_asks_for_more_exchange_step_by_step() -> None:
    names: list[str] = []
    for memory in (10**7, 500_000):
        config, _ = chosen(Goal.speed, Machine(world_size=8, nodes=2, memory=memory))
        name = f"{config.name} {config.reshard_after_forward} {config.cpu_offload}"
        if name not in names:
            names.append(name)
    assert names == ["ddp True False", "hsdp False False"]
    assert chosen(Goal.speed, Machine(world_size=3, nodes=1, memory=10**5))[0].cpu_offload


def test_memory_takes_the_least_that_stays_on_the_device_and_auto_leaves_more_room() -> None:
    roomy = Machine(world_size=8, nodes=2, memory=10**9)
    config, _ = chosen(Goal.memory, roomy)
    assert (config.name, config.cpu_offload) == ("fsdp", False)
    whole = need(DataParallelConfig(name="ddp"), roomy)  # type: ignore[arg-type]
    tight = replace(roomy, memory=round(whole / 0.8))
    assert chosen(Goal.speed, tight)[0].name == "ddp"
    assert chosen(Goal.auto, tight)[0].name == "hsdp"


def test_gradients_that_are_accumulated_are_counted_whole() -> None:
    module = replace(MODULE, dp_config=DataParallelConfig())
    sizes = [
        memory_of_step(MODEL, module, sequence_length=32, world_size=4, micro_batches=n).gradients
        for n in (1, 2)
    ]
    assert sizes[1] == 4 * MODEL.num_params > 3.5 * sizes[0]
    each = replace(MODULE, dp_config=DataParallelConfig(reduce_each_microbatch=True))
    found = memory_of_step(MODEL, each, sequence_length=32, world_size=4, micro_batches=2)
    assert found.gradients == sizes[0]


def test_gradients_are_reduced_at_each_micro_batch_where_whole_ones_do_not_fit() -> None:
    machine = Machine(world_size=8, nodes=1, memory=10**9)

    def taken(memory: int, micro_batches: int) -> DataParallelConfig:
        module, _ = choose(
            Goal.speed,
            MODEL,
            MODULE,
            replace(machine, memory=memory),
            sequence_lengths=[32],
            micro_batches=lambda readers: [micro_batches],
        )
        return module.dp_config

    dp_config = replace(MODULE.dp_config, prefetch_factor=1, reduce_each_microbatch=True)
    each = replace(MODULE, dp_config=dp_config)
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
        module = replace(MODULE, rank_microbatch_size=rows * 32)
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
    chosen(Goal.memory, Machine(world_size=4, nodes=1, memory=1))  # nothing fits: all are asked
    assert len(counts) == 1
