"""Which way ranks share the weights: a pure function of hardware and need, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.estimate.sharding import ROOM
from olm_train.extensions.auto.strategy import (
    GOALS,
    Choice,
    DeviceConfig,
    Preset,
    TrainerStrategy,
    choose_strategy,
)
from olm_train.parallel.config import DataParallelConfig, DataParallelType
from olm_train.parallel.mesh import Mesh

GB = 10**9


def need_of(whole: int, devices: DeviceConfig) -> Callable[[DataParallelConfig], int]:
    """Bytes of a model of `whole` bytes: cut, and gathered again if it is kept."""

    def need(config: DataParallelConfig) -> int:
        if devices.world_size == 1:
            return whole
        shards = config.mesh(devices.world_size, devices.nodes).dp_shard
        kept = whole // 4 if shards > 1 and config.reshard_after_forward is False else 0
        return 1 if config.cpu_offload else whole // shards + kept

    return need


def devices_of(ranks: int, nodes: int = 1, memory: int = 80 * GB, **options: Any) -> DeviceConfig:
    return DeviceConfig(
        **{"device": "cuda", "name": "H100", "gpus": 8, **options},
        memory=memory,
        world_size=ranks,
        nodes=nodes,
    )


def chosen(whole: int, devices: DeviceConfig, **options: Any) -> Choice:
    return choose_strategy(devices, need_of(whole, devices), **options)


@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 2000),
    st.sampled_from(list(GOALS)),
    st.none() | st.sampled_from(list(TrainerStrategy)),
)
def test_the_choice_fits_the_ranks_and_says_why(
    nodes: int,
    per_node: int,
    device: str,
    gigabytes: int,
    preset: Preset,
    force: TrainerStrategy | None,
) -> None:
    ranks = nodes * per_node
    devices = devices_of(ranks, nodes, device=device)
    divided = any(ranks % n == 0 for n in range(2, ranks))
    if force is not None and (
        (force == "single") != (ranks == 1) or (force == "hsdp" and not divided)
    ):
        with pytest.raises(UsageError) as error:
            chosen(gigabytes * GB, devices, preset=preset, force=force)
        assert (error.value.where, bool(error.value.fix)) == ("force_strategy", True)
        return
    choice = chosen(gigabytes * GB, devices, preset=preset, force=force)
    text = "\n".join(choice.why)
    assert choice == chosen(gigabytes * GB, devices, preset=preset, force=force)
    assert force in (None, choice.strategy)
    assert (choice.strategy == "single") == (ranks == 1)
    assert text.count("<- chosen") == 1
    assert text.startswith(f"AutoTrainer: {choice.strategy}: ")
    assert (f"chosen for {preset}" if force is None else "is forced") in text
    needs = need_of(gigabytes * GB, devices)
    fits = needs(choice.dp_config) <= round(ROOM[GOALS[preset]] * devices.memory)
    assert fits != ("warning: " in text)
    if ranks > 1:
        choice.dp_config.mesh(ranks, nodes)
        assert choice.strategy == choice.dp_config.name
        assert not (device == "cpu" and choice.dp_config.cpu_offload)
    if force is None and ranks > 1 and preset != "memory_efficient":
        whole = needs(DataParallelConfig(name=DataParallelType.ddp))
        ddp_fits = whole <= round(ROOM[GOALS[preset]] * devices.memory)
        assert ddp_fits == (choice.strategy == "ddp")


@pytest.mark.parametrize(
    ("gigabytes", "ranks", "nodes", "preset", "strategy"),
    [
        (10, 1, 1, "balanced", "single"),
        (10, 8, 1, "balanced", "ddp"),
        (10, 8, 1, "memory_efficient", "fsdp"),
        (65, 8, 1, "balanced", "fsdp"),
        (65, 8, 1, "speed", "ddp"),
        (300, 8, 1, "speed", "fsdp"),
        (300, 16, 2, "balanced", "hsdp"),
        (300, 16, 2, "memory_efficient", "fsdp"),
        (800, 16, 2, "balanced", "fsdp"),
    ],
)
def test_the_guides_table_of_scenarios(
    gigabytes: int, ranks: int, nodes: int, preset: Preset, strategy: str
) -> None:
    choice = chosen(gigabytes * GB, devices_of(ranks, nodes), preset=preset)
    assert choice.strategy == strategy


def test_one_rank_is_told_of_the_other_gpus_and_of_what_does_not_fit() -> None:
    roomy = "\n".join(chosen(10 * GB, devices_of(1)).why)
    assert "1 of 8 GPUs is used; all: torchrun --nproc-per-node=8 script.py" in roomy
    tight = "\n".join(chosen(300 * GB, devices_of(1, gpus=1)).why)
    assert "nothing fits by this estimate" in tight
    assert "GPUs is used" not in tight


@pytest.mark.parametrize(
    ("force", "ranks"), [("fsdp", 1), ("ddp", 1), ("single", 2), ("hsdp", 2), ("hsdp", 7)]
)
def test_what_the_ranks_do_not_fit_is_refused(force: str, ranks: int) -> None:
    with pytest.raises(UsageError, match=f"force_strategy {force} does not fit {ranks} rank") as at:
        chosen(GB, devices_of(ranks), force=TrainerStrategy(force))
    assert "torchrun --nproc-per-node=8 script.py" in (at.value.fix or "")


def test_hsdp_on_one_machine_has_two_copies() -> None:
    choice = chosen(10 * GB, devices_of(4), force=TrainerStrategy.MULTI_GPU_HSDP)
    assert choice.dp_config.mesh(4) == Mesh(dp_replicate=2, dp_shard=2)


def test_given_options_are_taken_and_must_agree_with_what_is_forced() -> None:
    devices, config = devices_of(8), DataParallelConfig(reshard_after_forward=False)
    choice = chosen(80 * GB, devices, given=config, fixed=True)
    assert (choice.strategy, choice.dp_config) == ("fsdp", config)
    text = "\n".join(choice.why)
    assert text.startswith("AutoTrainer: fsdp: dp_config is given: H100, 8 ranks on 1 machine")
    assert "30 GB  <- chosen" in text
    with pytest.raises(UsageError, match="force_strategy ddp does not fit dp_config"):
        chosen(GB, devices, given=config, fixed=True, force=TrainerStrategy.MULTI_GPU_DDP)


def test_what_is_found_here() -> None:
    found = DeviceConfig.here(World())
    assert (found.device, found.name, found.world_size, found.nodes) == ("cpu", "CPU", 1, 1)
    assert found.memory > GB
    with pytest.raises(UsageError, match="memory"):
        DeviceConfig(memory=0)
