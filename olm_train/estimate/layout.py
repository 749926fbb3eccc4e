"""Choose how ranks share a run, over all axes: weights, rows, matrices, layers, experts.

    parallel: auto | speed | memory, model, options, Machine
      -> ways to share the weights (`sharding.py`), then layouts of one more axis, of two, ...
      -> what refuses each; its memory; until some fit -> of these, the one that takes least time
      -> train_module, why

An axis that the user set stays as it is. Only if no layout fits, the host's memory is taken.

The time of a step is that of its FLOPs, the bubble of a pipeline, and what the rank that sends most
sends over links as fast as is common: a comparison, no forecast.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any, Literal

from olm_data.errors import UsageError
from olm_train.data.dealing import require_equal_parts
from olm_train.estimate.flops import document_pairs, num_flops_per_token
from olm_train.estimate.memory import TrainingTensors, memory_of_step
from olm_train.estimate.sharding import Goal, Machine, Way, candidates, cheapest
from olm_train.estimate.traffic import traffic_of_step
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.mixture import MixtureConfig
from olm_train.parallel.config import (
    ContextParallelConfig,
    ExpertParallelConfig,
    PipelineParallelConfig,
    TensorParallelConfig,
)
from olm_train.parallel.context import require_tokens_alone
from olm_train.parallel.expert import require_dealable
from olm_train.parallel.mesh import COUNTS, WHOLE, Axes, Mesh, divisors
from olm_train.parallel.pipeline import require_stages
from olm_train.parallel.stages import Timeline, require_micro_batches
from olm_train.parallel.tensor import require_cuttable
from olm_train.train_module_config import TransformerTrainModuleConfig

FLOPS = 4e14
"""Of a rank in a second: 40 % of an H100's peak."""
INSIDE, BETWEEN = 200e9, 25e9
"""Bytes that a rank sends in a second inside a machine and between machines: about half of what
NVLink and an adapter of 400 Gbit/s for each rank do."""
EXCHANGES: tuple[Literal["ulysses", "needed"], ...] = ("ulysses", "needed")
"""Of keys: that by which ranks keep none of others', and that which fits any heads."""
SHOWN = 6
"""Layouts of as many axes that are shown."""
RANKS: dict[str, Axes] = {"ddp": COUNTS, "fsdp": WHOLE.sharded, "hsdp": ("dp_replicate",)}
"""Axes of the ranks that send to each other, by what `traffic_of_step` calls it; others are one."""
MicroBatches = Callable[[int], list[int]]
"""Number of readers -> micro-batches of a rank in steps of each size."""
Shared = Way[TransformerTrainModuleConfig]


def choose(
    goal: Goal,
    model: DecoderConfig,
    module: TransformerTrainModuleConfig,
    machine: Machine,
    *,
    sequence_lengths: Sequence[int],
    micro_batches: MicroBatches,
) -> tuple[TransformerTrainModuleConfig, list[str]]:
    """Return the options to train with, and lines that say why.

    Args:
        module: its micro-batch, dtypes and optimiser count; of `dp_config` the dtypes.
        sequence_lengths: tokens of a row, of each stage.

    Raises:
        UsageError: what is set fits neither the ranks nor the model.
    """
    if machine.world_size == 1:
        return module, [f"parallel: {goal}: one rank, nothing to share"]
    run = SharedRun(model, module, machine, sequence_lengths, micro_batches)
    room = machine.room(goal)
    ways = run.ways(module)
    tried, notes = [way for way in ways if not way.offloaded], list[str]()
    for more in range(1, 1 + len(run.free)):
        if any(way.need <= room for way in tried):
            break
        found, refused = run.layouts(more, 0 if goal is Goal.memory else room)
        times = {way.what: run.seconds(way.config) for way in found if way.need <= room}
        if goal is Goal.memory:
            found.sort(key=lambda way: way.need)
        else:
            found.sort(key=lambda way: (times.get(way.what, math.inf), way.need))
        for way in found[:SHOWN]:
            time = f"; {times[way.what]:.3g} s a step" if way.what in times else ""
            tried.append(way._replace(what=f"{way.what}{time}"))
        if len(found) > SHOWN:
            notes.append(f"  {SHOWN} of {len(found)} layouts are shown, of which {len(times)} fit")
        notes += [f"  refused: {axes}: {why}" for axes, why in refused.items()]
    chosen, lines = cheapest(goal, machine, tried + [way for way in ways if way.offloaded])
    return chosen, [f"parallel: {goal}: {lines[0]}", *lines[1:], *notes]


@dataclass(frozen=True)
class SharedRun:
    """A run that ranks are to share.

    Attributes:
        model, module, machine, sequence_lengths, micro_batches: as in `choose`.
    """

    model: DecoderConfig
    module: TransformerTrainModuleConfig
    machine: Machine
    sequence_lengths: Sequence[int]
    micro_batches: MicroBatches

    @cached_property
    def free(self) -> list[str]:
        """Axes that the user did not set and the model has a use for."""
        experts = isinstance(self.model.feed_forward, MixtureConfig)
        axes = ("tp", "cp", "pp", *(["ep"] if experts else []))
        return [axis for axis in axes if getattr(self.module, f"{axis}_config") is None]

    def layouts(self, more: int, room: int) -> tuple[list[Shared], dict[str, str]]:
        """Return the layouts of `more` axes than the user set, each with the first way to share the
        weights that fits or the one that needs least; and of axes with refused ones, why the first
        was."""
        found, refused = list[Shared](), dict[str, str]()
        readers = self._mesh(self.module).readers
        for axes in combinations(self.free, more):
            for configs in product(*(self._degrees(axis) for axis in axes)):
                pairs = [*zip(axes, configs, strict=True)]
                if readers % math.prod(config.degree for axis, config in pairs if axis != "ep"):
                    continue
                options = {f"{axis}_config": config for axis, config in pairs}
                try:
                    ways = self.ways(replace(self.module, **options))
                except UsageError as error:
                    refused.setdefault(" x ".join(axes), error.what)
                    continue
                here = [way for way in ways if not way.offloaded]
                least = min(here, key=lambda way: way.need)
                way = next((way for way in here if way.need <= room), least)
                degrees = " x ".join(map(_words, axes, configs))
                found.append(way._replace(what=f"{degrees}; {way.what}"))
        return found, refused

    def _degrees(self, axis: str) -> list[Any]:
        ranks = self.machine.world_size
        if axis == "tp":
            near = divisors(ranks // self.machine.nodes)[1:]
            return [TensorParallelConfig(degree=degree) for degree in near]
        degrees = divisors(ranks)[1:]
        if axis == "cp":
            return [
                ContextParallelConfig(degree=n, exchange=each)
                for n in degrees
                for each in EXCHANGES
            ]
        kind = PipelineParallelConfig if axis == "pp" else ExpertParallelConfig
        return [kind(degree=degree) for degree in degrees]

    def ways(self, module: TransformerTrainModuleConfig) -> list[Shared]:
        """Return ways to share the weights, least exchange first.

        Raises:
            UsageError: the ranks, the model or its steps refuse them all.
        """
        ranks, nodes, mesh = self.machine.world_size, self.machine.nodes, self._mesh(module)
        if mesh.tp > 1:
            for length in self.sequence_lengths:
                require_equal_parts(length, mesh.tp, "train_module.tp_config.degree")
        count = max(self.micro_batches(mesh.readers))
        of_stage = replace(
            self.machine, world_size=ranks // mesh.pp, nodes=max(1, nodes // mesh.pp)
        )
        found, refusals = list[Shared](), list[UsageError]()
        for what, dp_config in candidates(
            of_stage,
            module.dp_config,
            sharers=module.sharers,
            dealt=module.parted,
            accumulates=count > 1,
        ):
            config = replace(module, dp_config=dp_config)
            try:
                require_layout(config, self._decoder, ranks, nodes, self.micro_batches)
            except UsageError as error:
                refusals.append(error)
                continue
            need = memory_of_step(self.model, config, **self._step(count))
            found.append(Way(what, config, need.total, dp_config.cpu_offload))
        if not found:  # each has its reasons: the commonest
            words = [refusal.what for refusal in refusals]
            raise max(refusals, key=lambda refusal: words.count(refusal.what))
        return found

    def seconds(self, module: TransformerTrainModuleConfig) -> float:
        """Return what a step takes: to compare."""
        near = self.machine.world_size // self.machine.nodes
        mesh, length = self._mesh(module), max(self.sequence_lengths)
        count = max(self.micro_batches(mesh.readers))
        sent = traffic_of_step(self.model, module, **self._step(count))
        tokens = count * module.rank_microbatch_size / (mesh.pp * module.sharers)
        pairs = document_pairs(self.model, length) / length
        flops = tokens * num_flops_per_token(self.model, pairs_per_token=pairs)
        pipeline = module.pp_config
        bubble = 0.0 if pipeline is None else Timeline(pipeline, count).bubble
        links = [amount / _speed(mesh, axis, near) for axis, amount in sent.items()]
        return flops / FLOPS / (1 - bubble) + sum(links)

    def _step(self, micro_batches: int) -> dict[str, Any]:
        """Return what estimates of a step ask beside its configuration."""
        return {
            "sequence_length": max(self.sequence_lengths),
            "world_size": self.machine.world_size,
            "nodes": self.machine.nodes,
            "micro_batches": micro_batches,
            "counted": self._tensors,
        }

    def _mesh(self, module: TransformerTrainModuleConfig) -> Mesh:
        return module.mesh(self.machine.world_size, self.machine.nodes)

    @cached_property
    def _tensors(self) -> TrainingTensors:
        return TrainingTensors.count(self.model, self.module.optim)

    @cached_property
    def _decoder(self) -> Decoder:
        return build_decoder(self.model, device="meta")


def require_layout(
    module: TransformerTrainModuleConfig,
    decoder: Decoder,
    world_size: int,
    nodes: int,
    micro_batches: MicroBatches,
) -> Mesh:
    """Return which rank does what; refuse a layout that the model or its steps do not allow.

    Raises:
        UsageError: why, and what to set instead.
    """
    mesh = module.mesh(world_size, nodes)
    if (pipeline := module.pp_config) is not None:
        require_micro_batches(pipeline, *micro_batches(mesh.readers))
        require_stages(pipeline, decoder)
        module.check_schedule(world_size)
    if (context := module.cp_config) is not None:
        require_tokens_alone(context, decoder, mesh.tp)
    if mesh.tp > 1:
        require_cuttable(decoder, module.chosen_loss(decoder.config), mesh)
    if mesh.ep > 1:
        require_dealable(decoder, mesh)
    return mesh


def _speed(mesh: Mesh, axis: str, near: int) -> float:
    """Return the bytes a second between ranks along an axis, with `near` of them to a machine."""
    groups = mesh.groups(*RANKS.get(axis, (axis,)))
    inside = all(ranks[0] // near == ranks[-1] // near for ranks in groups)
    return INSIDE if inside else BETWEEN


def _words(axis: str, config: Any) -> str:
    exchange = getattr(config, "exchange", None)
    return f"{axis} {config.degree}" + (f" ({exchange})" if exchange else "")
