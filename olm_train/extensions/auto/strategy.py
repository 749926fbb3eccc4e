"""How a run shares its weights over its ranks, chosen from hardware and size, with the reason.

    DeviceConfig, bytes that each way needs, preset --estimate.sharding--> dp_config, why in words

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Literal

import torch

from olm_data.config.hints import NonNegativeInt, OneOf
from olm_data.counts import counted
from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.estimate.device_defaults import Capability
from olm_train.estimate.sharding import Goal, Machine, Need, Way, Ways, candidates, cheapest
from olm_train.parallel.config import DataParallelConfig
from olm_train.parallel.mesh import divisors


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

    @classmethod
    def _missing_(cls, value: object) -> TrainerStrategy | None:
        return cls.__members__.get(str(value))


Named = Annotated[
    TrainerStrategy | str, OneOf(lambda: [*TrainerStrategy, *TrainerStrategy.__members__])
]
"""A strategy, its value such as "ddp", or its name."""
Preset = Literal["balanced", "memory_efficient", "speed"]
"""What a choice is made for. With `memory_efficient` a decoder also computes activations twice
instead of keeping them, and its loss a part of the logits at a time."""
GOALS: dict[Preset, Goal] = {
    "balanced": Goal.auto,
    "memory_efficient": Goal.memory,
    "speed": Goal.speed,
}


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(Machine):
    """The hardware of a run, as a choice sees it.

    Attributes:
        device: of each rank.
        name: of the device, for people.
        gpus: CUDA devices of this machine, in use or not.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    name: str = "CPU"
    gpus: NonNegativeInt = 0

    @classmethod
    def here(cls, world: World | None = None) -> DeviceConfig:
        """Return what this process finds; `dataclasses.replace` changes a part of it."""
        world = world or World()
        return replace(
            cls.of(world),
            device="cuda" if world.device.type == "cuda" else "cpu",
            name=Capability.of(world.device).name,
            gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        )


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
    need: Need,
    given: DataParallelConfig | None = None,
    *,
    preset: Preset = "balanced",
    force: TrainerStrategy | None = None,
    fixed: bool = False,
) -> Choice:
    """Choose how ranks share the weights.

    Args:
        given: its dtypes are kept.
        force: to be taken, whatever else fits.
        fixed: `given` is taken as it is.

    Raises:
        UsageError: what is forced fits neither the number of ranks nor what is fixed.
    """
    told = f"{force} is forced" if force else f"chosen for {preset}"
    if fixed:
        told = "dp_config is given"
    ways = _ways(devices, given or DataParallelConfig(), force, fixed=fixed)
    ways = [way for way in ways if force in (None, _strategy(devices, way[1]))]
    if not ways:
        raise UsageError(
            f"force_strategy {force} does not fit "
            f"{'dp_config' if fixed else counted(devices.world_size, 'rank')}",
            where="force_strategy",
            why="single is for one rank, ddp and fsdp are for several, hsdp is for groups of "
            "several; each rank is a process that torchrun starts",
            fix="leave it out, or start as many as it is for: python script.py, or "
            f"torchrun --nproc-per-node={max(devices.gpus, 4)} script.py",
        )
    tried = [Way(what, config, need(config), config.cpu_offload) for what, config in ways]
    config, lines = cheapest(GOALS[preset], devices, tried)
    strategy = _strategy(devices, config)
    lines[0] = f"AutoTrainer: {strategy}: {told}: {devices.name}, {lines[0]}"
    if devices.world_size == 1 < devices.gpus and devices.device == "cuda":
        lines.append(
            f"  note: 1 of {devices.gpus} GPUs is used; all: torchrun "
            f"--nproc-per-node={devices.gpus} script.py"
        )
    return Choice(strategy=strategy, dp_config=config, why=tuple(lines))


def _strategy(devices: DeviceConfig, config: DataParallelConfig) -> TrainerStrategy:
    return TrainerStrategy("single" if devices.world_size == 1 else config.name.value)


def _ways(
    devices: DeviceConfig, given: DataParallelConfig, force: TrainerStrategy | None, *, fixed: bool
) -> Ways:
    if fixed or devices.world_size == 1:
        return [("as given" if fixed else "whole on the one rank", given)]
    groups, nodes = divisors(devices.world_size)[1:-1], devices.nodes
    if force is TrainerStrategy.MULTI_GPU_HSDP and groups and nodes in (1, devices.world_size):
        nodes = groups[0]  # of ranks that no machines divide
    ways = candidates(replace(devices, nodes=nodes), given)
    # on CPUs the weights are in the host's memory anyway
    return [way for way in ways if devices.device == "cuda" or not way[1].cpu_offload]
