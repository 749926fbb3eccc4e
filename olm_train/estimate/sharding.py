"""Choose how ranks share the weights, from their number and the memory of a device.

    parallel: auto | speed | memory, model, micro-batch, Machine
      -> candidates, least exchange first -> memory of each -> the first that fits -> dp_config, why

    ddp -> cut over a machine, kept whole between forward and backward -> cut and freed
        -> cut over all machines -> in the host's memory

`speed` plans with nine tenths of a device, `auto` with seven tenths, since the estimate knows
neither fragments nor the buffers of collectives; `memory` takes the least that stays on the device.

Pure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from olm_data.config.convert import Config
from olm_data.config.hints import PositiveInt
from olm_data.counts import counted
from olm_train.distributed.world import World
from olm_train.estimate.memory import TrainingTensors, memory_of_step
from olm_train.model.config import DecoderConfig
from olm_train.optim.base import OptimConfig
from olm_train.parallel.config import DataParallelConfig
from olm_train.train_module_config import TransformerTrainModuleConfig

CHOSEN = (
    *("name", "num_replicas", "shard_degree", "reshard_after_forward"),
    *("prefetch_factor", "cpu_offload"),
)
"""Fields of `dp_config` that a choice sets; the others are the user's."""


T = TypeVar("T")


class Goal(StrEnum):
    """What to choose for."""

    auto = "auto"
    """The least exchange that leaves room for what the estimate does not know."""
    speed = "speed"
    """The least exchange that fits."""
    memory = "memory"
    """The least memory, for longer rows or larger micro-batches than were stated."""


ROOM = {Goal.auto: 0.7, Goal.speed: 0.9, Goal.memory: 0.9}
"""Share of a device's memory that a choice may fill."""


HOST = 0.85
"""Share of a machine's memory that tensors may take on CPUs: the C allocator holds up to an eighth
more than they need, and the system and the programs are there too."""


@dataclass(frozen=True, kw_only=True)
class Machine(Config):
    """What a run has.

    Attributes:
        world_size: ranks.
        nodes: machines they are on, as many on each.
        memory: bytes of each rank's device; on CPUs `HOST` of the machine's, shared by its ranks.
    """

    world_size: PositiveInt = 1
    nodes: PositiveInt = 1
    memory: PositiveInt

    def room(self, goal: Goal) -> int:
        """Return the bytes to plan with."""
        return round(ROOM[goal] * self.memory)

    @classmethod
    def of(cls, world: World) -> Self:
        """Return that of a run."""
        if world.device.type == "cuda":
            memory = torch.cuda.get_device_properties(world.device).total_memory
        else:
            ranks = len(world.neighbours) if world.neighbours else 1
            memory = int(HOST * os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE") // ranks
        return cls(world_size=world.size, nodes=world.nodes, memory=memory)


Need = Callable[[DataParallelConfig], int]
"""Bytes of a rank with these options."""


def need_of_decoder(
    model: DecoderConfig,
    module: TransformerTrainModuleConfig,
    machine: Machine,
    *,
    sequence_length: int,
    micro_batches: int,
    optim: OptimConfig | None = None,
) -> Need:
    """Return the need of a decoder; its tensors are counted once, whatever is asked.

    Args:
        optim: whose state is counted; None: that of `module`.
    """
    tensors = TrainingTensors.count(model, optim or module.optim)

    def need(config: DataParallelConfig) -> int:
        return memory_of_step(
            model,
            replace(module, dp_config=config),
            sequence_length=sequence_length,
            world_size=machine.world_size,
            nodes=machine.nodes,
            micro_batches=micro_batches,
            counted=tensors,
        ).total

    return need


Ways = list[tuple[str, DataParallelConfig]]
"""Ways to share the weights, in words and as options, least exchange first."""


class Way(NamedTuple, Generic[T]):
    """A way to share a run.

    Attributes:
        what: it is, in words.
        config: its options.
        need: bytes of a rank.
        offloaded: what the device has no room for lies in the host's memory.
    """

    what: str
    config: T
    need: int
    offloaded: bool


def cheapest(goal: Goal, machine: Machine, ways: Sequence[Way[T]]) -> tuple[T, list[str]]:
    """Return the first way that fits (`memory`: that needs least), and lines that say why.

    Args:
        ways: at least one, the best first.
    """
    room = machine.room(goal)
    lines = [
        f"{counted(machine.world_size, 'rank')} on {counted(machine.nodes, 'machine')}, "
        f"{machine.memory / 1e9:.4g} GB each, "
        f"{room / 1e9:.4g} GB to plan with"
    ]
    fitting = [way for way in ways if way.need <= room]
    least = min(ways, key=lambda way: (way.offloaded, way.need))
    if goal is Goal.memory and least.need <= room:
        chosen = least
    else:
        chosen = fitting[0] if fitting else min(ways, key=lambda way: way.need)
    width = max(58, *(len(way.what) for way in ways))
    for way in ways:
        mark = "<- chosen" if way is chosen else "too much" if way.need > room else "fits"
        lines.append(f"  {way.what:<{width}} {way.need / 1e9:>9.4g} GB  {mark}")
    if not fitting:
        lines.append(
            "  warning: nothing fits by this estimate; take smaller micro-batches, or more ranks"
        )
    return chosen.config, lines


def candidates(
    machine: Machine,
    given: DataParallelConfig,
    *,
    sharers: int = 1,
    dealt: int = 1,
    accumulates: bool = False,
) -> Ways:
    """Return ways to share the weights, in words and as options, least exchange first.

    Args:
        given: its dtypes are kept.
        sharers: ranks that share a micro-batch, and a copy of the weights too if those are cut.
        dealt: ranks of a copy of the weights that have other ones of them.
        accumulates: whether a step has several micro-batches.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    if given.reduce_dtype == "float32" and dealt == 1:  # ddp sums in nothing else
        found.append(("ddp: whole on each rank", {"name": "ddp"}))
    copies = machine.world_size // sharers % machine.nodes == 0  # one on each machine
    copies &= machine.world_size // machine.nodes % dealt == 0
    if 1 < machine.nodes < machine.world_size and copies:
        found += [
            (f"hsdp: {machine.nodes} copies, kept from forward to backward",
             {"name": "hsdp", "num_replicas": machine.nodes, "reshard_after_forward": False}),
            (f"hsdp: {machine.nodes} copies",
             {"name": "hsdp", "num_replicas": machine.nodes, "prefetch_factor": 1}),
        ]  # fmt: skip
    else:
        found.append(
            ("fsdp: cut over all ranks, kept from forward to backward",
             {"name": "fsdp", "reshard_after_forward": False}),
        )  # fmt: skip
    fsdp: dict[str, Any] = {"name": "fsdp", "prefetch_factor": 1}
    found.append(("fsdp: cut over all ranks", fsdp))
    each = {"reduce_each_microbatch": True} if accumulates else {}
    if accumulates:
        found.append(("fsdp: cut over all ranks, gradients at each micro-batch", fsdp | each))
    offloaded = {"name": "fsdp", "cpu_offload": True} | each
    found.append(("fsdp: cut over all ranks, in the host's memory", offloaded))
    return [(what, replace(given, **options)) for what, options in found]
