"""How ranks share the work: the options of parallelism, checked before anything is built.

    dp_config, pp_config, cp_config, tp_config, ep_config of train.yaml -> mesh(world)
                                                                        -> apply.parallelize

Pure: no process group, no device. Names are those of OLMo-core.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

import torch
from msgspec import Meta

from olm_data.config.convert import Config
from olm_data.config.hints import Needs, NonNegativeInt, PositiveInt
from olm_data.counts import counted
from olm_data.errors import UsageError
from olm_train.parallel.mesh import WHOLE, Mesh, divisors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "dualpipev"]
V_SHAPED = ("zero_bubble", "dualpipev")
"""The first rank has the first and the last stage."""


class DataParallelType(StrEnum):
    """How the processes of a data-parallel group share the weights."""

    fsdp = "fsdp"
    """Weights, gradients and optimiser state are cut over all processes (FSDP2)."""
    hsdp = "hsdp"
    """They are cut over groups of processes; each group holds a whole replica."""
    ddp = "ddp"
    """Each process holds all of them (DistributedDataParallel)."""


_SHARDED = Needs("name", unless=DataParallelType.ddp)
_REPLICAS = Needs("name", value=DataParallelType.hsdp)
_CALLED = {
    **{axis: f"train_module.{axis}_config.degree" for axis in ("pp", "cp", "tp", "ep")},
    "dp_replicate": "train_module.dp_config.num_replicas",
    "dp_shard": "train_module.dp_config.shard_degree",
}


@dataclass(frozen=True, kw_only=True)
class PipelineParallelConfig(Config):
    """Ranks that have other layers, for models whose weights one machine cannot hold.

    Attributes:
        degree: ranks that the layers are cut over, and that read the same rows; a divisor of the
            run's. Those of a stage are neighbours: stages are spread over machines first.
        schedule: in which order the ranks take the micro-batches of a step: gpipe, 1f1b; with two
            stages a rank interleaved_1f1b, zero_bubble (ZB-V) and dualpipev, see
            [schedules](../how-to/train-many-layers.md#schedules).
        split_points: first layer of each stage but the first, ascending, counted from 0; default:
            stages of about as many FLOPs. With interleaved_1f1b they may make more stages, a
            multiple of `degree`.
    """

    degree: Annotated[int, Meta(ge=2)]
    schedule: PipelineSchedule = "1f1b"
    split_points: list[PositiveInt] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        points, degree = self.split_points, self.degree
        if points is None:
            return
        stages, where = len(points) + 1, "train_module.pp_config.split_points"
        if sorted({*points}) != points:
            raise UsageError(f"{points} do not ascend", where=where, fix="give first layers")
        looped = self.schedule == "interleaved_1f1b" and stages % degree == 0 and stages > degree
        if not looped and stages != (default := degree * self.stages_of_a_rank):
            raise UsageError(
                f"{counted(len(points), 'split point')} make {counted(stages, 'stage')}; "
                f"{degree} ranks have {default} with the schedule {self.schedule}",
                where=where,
                fix=f"give {default - 1}, or leave them out",
            )

    @property
    def stages(self) -> int:
        """Number of stages."""
        if self.split_points is not None:
            return len(self.split_points) + 1
        return self.degree * self.stages_of_a_rank

    @property
    def stages_of_a_rank(self) -> int:
        """How many a rank has, unless split points say otherwise."""
        return 1 if self.schedule in ("gpipe", "1f1b") else 2

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed later than those of activations."""
        return self.schedule in V_SHAPED

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of one of the ranks, ascending."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def rank_of(self, stage: int) -> int:
        """Return which of the ranks has a stage."""
        if self.schedule in V_SHAPED:
            return min(stage, self.stages - 1 - stage)
        return stage % self.degree


@dataclass(frozen=True, kw_only=True)
class ContextParallelConfig(Config):
    """Ranks that share the tokens of each micro-batch, for rows too long for one.

    Attributes:
        degree: ranks that share a micro-batch, and read the same rows; a divisor of the run's.
        exchange: gather: each gets all keys and values of a layer; needed: those that its queries
            attend to; ulysses: each gets all tokens of its part of the heads, whose keys `degree`
            has to divide.
    """

    degree: Annotated[int, Meta(ge=2)]
    exchange: Literal["gather", "needed", "ulysses"] = "gather"


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig(Config):
    """Ranks that the matrices of a block and the vocabulary are cut over, for wide models.

    Attributes:
        degree: ranks that share each product, and read the same rows; it divides the heads, the
            width of feed-forward layers, the rows of the vocabulary's tables and those of the data.
    """

    degree: Annotated[int, Meta(ge=2)]


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig(Config):
    """Ranks that the experts of a mixture are dealt to, for more experts than fit one.

    Attributes:
        degree: ranks that have other experts; a divisor of the experts of a block, and of the ranks
            that a copy of the weights is cut over.
    """

    degree: Annotated[int, Meta(ge=2)]


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig(Config):
    """Data parallelism and its precision.

    Nothing is wrapped on one rank: there only `param_dtype` has an effect.

    Attributes:
        name: how ranks share the weights: cut over all, cut over groups of ranks that each hold a
            replica, or whole on each; nothing is wrapped on one rank.
        param_dtype: dtype the blocks compute in, "bfloat16" or "float32"; auto: [what fits the
            device](#what-auto-stands-for). Master weights and optimiser state are fp32 in any case.
        reduce_dtype: fsdp, hsdp: dtype in which gradients are summed over ranks. DDP sums fp32
            gradients.
        num_replicas: hsdp: number of replicas; default: one on each machine.
        shard_degree: hsdp: ranks a replica is cut over, with cp_config groups of `degree` ranks;
            default: the ranks of a machine. One of the two is enough.
        reshard_after_forward: fsdp, hsdp: true: the weights of a block are freed after its
            forward pass and gathered again for its backward pass; false: kept in between, more
            memory and a third less exchange; a number: kept cut over so many ranks.
        prefetch_factor: fsdp, hsdp: blocks whose weights are asked for while another one
            computes; 0: the one that comes next, as late as that works. Of a model of one's own:
            the modules that are cut over the ranks by themselves, in the order it has them.
        reduce_each_microbatch: fsdp, hsdp: gradients are summed over the ranks of a copy, and cut,
            after each micro-batch; false: after the last one of a step, and until then each rank
            holds whole ones. Less memory, more exchange, the sums in another order.
        cpu_offload: fsdp, hsdp: weights, gradients and optimiser state live in the host's memory,
            where the optimiser steps; at least two ranks.
    """

    name: DataParallelType = DataParallelType.fsdp
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], _SHARDED] = "float32"
    num_replicas: Annotated[PositiveInt | None, _REPLICAS] = None
    shard_degree: Annotated[PositiveInt | None, _REPLICAS] = None
    reshard_after_forward: Annotated[bool | Annotated[int, Meta(ge=2)], _SHARDED] = True
    prefetch_factor: Annotated[NonNegativeInt, _SHARDED] = 0
    reduce_each_microbatch: Annotated[bool, _SHARDED] = False
    cpu_offload: Annotated[bool, _SHARDED] = False

    @property
    def shards(self) -> bool:
        """Whether the weights are cut at all."""
        return self.name is not DataParallelType.ddp

    def mesh(self, world_size: int, nodes: int = 1, **degrees: int) -> Mesh:
        """Return which rank of a run does what.

        Args:
            world_size: ranks of the run.
            nodes: machines they are on, as many on each.
            degrees: `pp`, `cp`, `tp` and `ep` of the `Mesh`.

        Raises:
            UsageError: `pp`, `cp`, `tp` or `ep` does not fit the ranks or this configuration, or
                its degrees do not fit more than one.
        """
        given = Mesh(**degrees)
        if world_size == 1 and given == Mesh():
            return given
        if given.ep > 1:
            self._require_sharded("ep_config", "experts are dealt to")
        if given.tp > 1:
            self._require_sharded("tp_config", "matrices are cut over")
        replicas, shards = self.num_replicas, self.shard_degree
        if self.name is not DataParallelType.hsdp:
            replicas, shards = (1, None) if self.shards else (None, 1)
        elif replicas is None and shards is None:
            replicas = max(1, nodes // given.pp)
        mesh = Mesh.over(
            world_size, dp_replicate=replicas, dp_shard=shards, called=_CALLED, **degrees
        )
        if given.pp > 1:
            self._require_staged(mesh)
        keep, cut = self.reshard_after_forward, mesh.degree(*WHOLE.sharded)
        if not isinstance(keep, bool) and cut % keep:
            raise UsageError(
                f"dp_config.reshard_after_forward {keep} does not divide the {cut} ranks "
                "that a replica is cut over",
                where="train_module.dp_config.reshard_after_forward",
                fix=f"one of {', '.join(map(str, divisors(cut)[1:]))}, true or false",
            )
        return mesh

    def _require_staged(self, mesh: Mesh) -> None:
        """Refuse what does not go with layers that are cut over ranks."""
        if not self.shards and mesh.dp_replicate > 1:
            raise UsageError(
                "ddp reduces gradients in the backward pass of a whole model, and pp_config cuts "
                "it into stages",
                where="train_module.dp_config.name",
                fix="set it to fsdp; or to hsdp with shard_degree: 1, which keeps copies as well",
            )
        if self.reduce_each_microbatch:
            raise UsageError(
                "with pp_config gradients are reduced once, after the last micro-batch of a stage",
                where="train_module.dp_config.reduce_each_microbatch",
                fix="leave one of the two out",
            )

    def _require_sharded(self, option: str, what: str) -> None:
        """Refuse what does not go with weights of which ranks have other ones.

        Args:
            option, what: that says so, and what it does to ranks.
        """
        if not self.shards:
            raise UsageError(
                f"ddp keeps all weights on each rank, and with {option} {what} ranks",
                where="train_module.dp_config.name",
                fix=f"set it to fsdp or hsdp, or leave {option} out",
            )
        if not isinstance(self.reshard_after_forward, bool):
            raise UsageError(
                f"weights cannot be kept cut over a number of ranks where {what} them",
                where="train_module.dp_config.reshard_after_forward",
                why="some weights are cut over fewer ranks than the others",
                fix=f"set it to true or false, or leave {option} out",
            )
