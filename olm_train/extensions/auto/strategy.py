"""How a run shares its weights over its ranks, chosen from hardware and size, with the reason.

    DeviceConfig, bytes that each way needs, preset --choose_strategy--> single | ddp | fsdp | hsdp
                                                                         dp_config, why in words

`choose_strategy` is pure. Never: a way to share that `estimate.sharding` does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Literal

import torch
from msgspec import Meta

from olm_data.config.convert import Config
from olm_data.config.hints import PositiveInt
from olm_data.errors import UsageError, suggest
from olm_train.distributed.world import World
from olm_train.estimate.device_defaults import Capability
from olm_train.estimate.sharding import ROOM, Goal, Machine, Ways, candidates, cheapest
from olm_train.parallel.config import DataParallelConfig, DataParallelType, divisors


class TrainerStrategy(StrEnum):
    """How the ranks of a run share weights, gradients and optimiser state; on CPUs too."""

    SINGLE = "single"
    """One rank."""
    MULTI_GPU_DDP = "ddp"
    """Each rank holds all of them."""
    MULTI_GPU_FSDP = "fsdp"
    """They are cut over all ranks (FSDP2)."""
    MULTI_GPU_HSDP = "hsdp"
    """They are cut over groups of ranks, each of which holds a copy."""


class Preset(StrEnum):
    """What a choice is made for."""

    balanced = "balanced"
    """The least exchange that leaves a third of the device free."""
    memory_efficient = "memory_efficient"
    """The least memory; a decoder also computes activations twice instead of keeping them, and its
    loss a part of the logits at a time."""
    speed = "speed"
    """The least exchange that fits."""


GOALS = {
    Preset.balanced: Goal.auto,
    Preset.memory_efficient: Goal.memory,
    Preset.speed: Goal.speed,
}


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(Config):
    """The hardware of a run, as a choice sees it.

    Attributes:
        device: of each rank.
        name: of the device, for people.
        gpus: CUDA devices of this machine, in use or not.
        memory: bytes of each rank's device; on CPUs the ranks of a machine share its memory.
        world_size: ranks.
        nodes: machines they are on, as many on each.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    name: str = "CPU"
    gpus: Annotated[int, Meta(ge=0)] = 0
    memory: PositiveInt
    world_size: PositiveInt = 1
    nodes: PositiveInt = 1

    @classmethod
    def here(cls, world: World | None = None) -> DeviceConfig:
        """Return what this process finds; `dataclasses.replace` changes a part of it."""
        world = world or World()
        machine = Machine.of(world)
        return cls(
            device="cuda" if world.device.type == "cuda" else "cpu",
            name=Capability.of(world.device).name,
            gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            memory=machine.memory,
            world_size=machine.world_size,
            nodes=machine.nodes,
        )

    @property
    def machine(self) -> Machine:
        """What the estimates want to know of it."""
        return Machine(world_size=self.world_size, nodes=self.nodes, memory=self.memory)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a run shares its weights.

    Attributes:
        strategy: in a word.
        dp_config: its options.
        why: lines for people.
    """

    strategy: TrainerStrategy
    dp_config: DataParallelConfig
    why: tuple[str, ...]


def choose_strategy(
    devices: DeviceConfig,
    need: Callable[[DataParallelConfig], int],
    *,
    preset: Preset = Preset.balanced,
    force: TrainerStrategy | None = None,
    given: DataParallelConfig | None = None,
) -> Choice:
    """Choose how ranks share the weights.

    Args:
        need: bytes a rank needs with such options.
        force: to be taken, whatever else fits.
        given: its dtypes are kept.

    Raises:
        UsageError: what is forced does not fit the number of ranks.
    """
    given = given or DataParallelConfig()
    if force is not None:
        _refuse_other_world(force, devices)
    told = f"{force or 'chosen'}{' is forced' if force else f' for {preset}'}"
    if devices.world_size == 1:
        return Choice(
            strategy=TrainerStrategy.SINGLE,
            dp_config=given,
            why=(
                f"AutoTrainer: single: {told}: {_alone(devices)}",
                *_room(devices, need(given), preset),
            ),
        )
    ways = candidates(devices.machine, given)
    if devices.device == "cpu":  # the weights are in the host's memory
        ways = [way for way in ways if not way[1].cpu_offload]
    if force is not None:
        kind = DataParallelType(force.value)
        ways = [way for way in ways if way[1].name is kind] or _in_groups(devices, given)
    config, lines = cheapest(GOALS[preset], devices.machine, ways, need)
    strategy = TrainerStrategy(config.name.value)
    return Choice(
        strategy=strategy,
        dp_config=config,
        why=(f"AutoTrainer: {strategy}: {told}: {devices.name}, {lines[0]}", *lines[1:]),
    )


def as_given(
    devices: DeviceConfig,
    need: Callable[[DataParallelConfig], int],
    given: DataParallelConfig,
    force: TrainerStrategy | None = None,
) -> Choice:
    """Return the options that somebody gave, with what they need.

    Raises:
        UsageError: another strategy is forced.
    """
    alone = devices.world_size == 1
    strategy = TrainerStrategy.SINGLE if alone else TrainerStrategy(given.name.value)
    if force not in (None, strategy):
        raise UsageError(
            f"force_strategy is {force}; dp_config is for {strategy}",
            where="force_strategy",
            fix="give one of them",
        )
    line = f"AutoTrainer: {strategy}: dp_config is given: {devices.name}, {devices.world_size} rank"
    line += f"{'' if alone else 's'}, {devices.memory / 1e9:.4g} GB each, "
    line += f"{need(given) / 1e9:.4g} GB needed"
    return Choice(strategy=strategy, dp_config=given, why=(line,))


def strategy_named(name: TrainerStrategy | str) -> TrainerStrategy:
    """Return a strategy by its value, such as "ddp", or its name.

    Raises:
        UsageError: there is none.
    """
    found = {each.value: each for each in TrainerStrategy} | dict(TrainerStrategy.__members__)
    if str(name) not in found:
        raise UsageError(
            f"unknown strategy {name!r}",
            where="force_strategy",
            fix=suggest(str(name), [each.value for each in TrainerStrategy]),
        )
    return found[str(name)]


def preset_named(name: Preset | str) -> Preset:
    """Return a preset by its name.

    Raises:
        UsageError: there is none.
    """
    if name not in Preset.__members__:
        raise UsageError(
            f"unknown preset {name!r}", where="preset", fix=suggest(name, list(Preset))
        )
    return Preset(name)


def _refuse_other_world(force: TrainerStrategy, devices: DeviceConfig) -> None:
    ranks, single = devices.world_size, force is TrainerStrategy.SINGLE
    if single and ranks > 1:
        raise UsageError(
            f"force_strategy {force} is for one rank; there are {ranks}",
            where="force_strategy",
            fix="start the script without torchrun, or choose ddp, fsdp or hsdp",
        )
    if not single and ranks == 1:
        count = max(devices.gpus, 2)
        raise UsageError(
            f"force_strategy {force} needs several ranks; there is one",
            where="force_strategy",
            why="ranks share the weights, and each is a process that torchrun starts",
            fix=f"torchrun --nproc-per-node={count} script.py, or leave force_strategy out",
        )
    if force is TrainerStrategy.MULTI_GPU_HSDP and not _inner_divisors(ranks):
        raise UsageError(
            f"force_strategy hsdp cuts {ranks} ranks into groups of equal size, and there are none "
            "but of one rank or of all",
            where="force_strategy",
            fix="start 4, 6, 8, ... ranks, or choose fsdp",
        )


def _inner_divisors(number: int) -> list[int]:
    return divisors(number)[1:-1]


def _in_groups(devices: DeviceConfig, given: DataParallelConfig) -> Ways:
    """Return HSDP for ranks that no machines divide."""
    replicas = _inner_divisors(devices.world_size)[0]
    groups = replace(given, name=DataParallelType.hsdp, num_replicas=replicas)
    return [
        (
            f"hsdp: {replicas} copies, kept from forward to backward",
            replace(groups, reshard_after_forward=False),
        ),
        (f"hsdp: {replicas} copies", replace(groups, prefetch_factor=1)),
    ]


def _alone(devices: DeviceConfig) -> str:
    return f"{devices.name}, one rank, {devices.memory / 1e9:.4g} GB"


def _room(devices: DeviceConfig, need: int, preset: Preset) -> list[str]:
    """Return what is to say of one rank: what it needs, and what else is there."""
    lines = [f"  {'whole on the one rank':<58} {need / 1e9:>9.4g} GB  <- chosen"]
    if need > ROOM[GOALS[preset]] * devices.memory:
        lines.append(
            "  warning: it does not fit by this estimate; take smaller batches, the preset "
            "memory_efficient, or more ranks: torchrun --nproc-per-node=N script.py"
        )
    if devices.gpus > 1 and devices.device == "cuda":
        lines.append(
            f"  note: 1 of {devices.gpus} GPUs is used; all: torchrun "
            f"--nproc-per-node={devices.gpus} script.py"
        )
    return lines
