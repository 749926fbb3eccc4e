"""Spread a decoder over data-parallel processes: one function, fixed order.

    compute dtype -> compile each block -> FSDP2 each block, then the root -> initial weights -> DDP

At world size 1 nothing is wrapped.

Gradients leave the backward pass as the exact sum over processes, never as a mean: the loss is
already divided by the global count of valid labels. They are exchanged at the last micro-batch of
a step only.
"""

# Annotations are objects here, not strings: DDP inspects those of the communication hook.

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from olm_data.errors import UsageError, suggest
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.parallel.mesh import data_parallel_mesh
from olm_train.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DataParallelType(StrEnum):
    """How the processes of a data-parallel group share the weights."""

    fsdp = "fsdp"
    """Weights, gradients and optimiser state are cut over the processes (FSDP2)."""
    ddp = "ddp"
    """Each process holds all of them (DistributedDataParallel)."""


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Data parallelism and its precision.

    Attributes:
        name: the strategy; without effect on one process.
        param_dtype: dtype the blocks compute in, "bfloat16" or "float32". Master weights and
            optimiser state are fp32 in any case.
        reduce_dtype: dtype FSDP2 sums gradients over processes in. DDP sums fp32 gradients.
    """

    name: DataParallelType = DataParallelType.fsdp
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        names = [member.value for member in DataParallelType]
        if self.name not in names:
            raise UsageError(
                f"unknown data-parallel strategy {self.name!r}",
                where="train_module.dp_config.name",
                fix=suggest(self.name, names),
            )
        object.__setattr__(self, "name", DataParallelType(self.name))
        for field in ("param_dtype", "reduce_dtype"):
            if getattr(self, field) not in DTYPES:
                raise UsageError(
                    f"dp_config.{field}: unknown dtype {getattr(self, field)!r}",
                    where=f"train_module.dp_config.{field}",
                    fix=suggest(str(getattr(self, field)), DTYPES),
                )
        if self.name is DataParallelType.ddp and self.reduce_dtype != "float32":
            raise UsageError(
                "dp_config.reduce_dtype has no effect with ddp, which sums fp32 gradients",
                where="train_module.dp_config.reduce_dtype",
                fix="leave it out, or use name: fsdp",
            )


def parallelize(
    model: Decoder,
    config: DataParallelConfig,
    world: World,
    *,
    seed: int,
    compile_model: bool = False,
) -> Decoder | DistributedDataParallel:
    """Prepare `model`, built on the meta device, for training.

    Its parameters are sharded in place or left whole, put on the device and given their initial
    values, the same bits for every strategy and world size.

    Returns:
        The module to call: DDP's wrapper with ddp, else `model` itself.

    Raises:
        UsageError: the attention back-end cannot train here.
    """
    model.compute_dtype = DTYPES[config.param_dtype]
    model.require_attention(world.device, model.compute_dtype, training=True)
    if compile_model:
        for block in model.blocks:
            # The forward function and not the module: FSDP's hooks stay outside the graph and
            # parameter names stay as they are.
            block.forward = torch.compile(block.forward, dynamic=False)
    if world.size > 1 and config.name is DataParallelType.fsdp:
        _fully_shard(model, config, world)
    model.to_empty(device=world.device)
    init_parameters(model, seed)
    if world.size > 1 and config.name is DataParallelType.ddp:
        return _replicate(model, world)
    return model


@contextmanager
def gradient_sync(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch: exchange gradients only if it is the last.

    Until then each process sums its own, in fp32.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield


def reshard(model: nn.Module) -> None:
    """Let the parameters be the sharded ones again.

    FSDP2 leaves those of the root whole after a forward pass without a backward pass, such as an
    evaluation; the optimiser's state belongs to the sharded ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _fully_shard(model: Decoder, config: DataParallelConfig, world: World) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.param_dtype],
        reduce_dtype=DTYPES[config.reduce_dtype],
        # Rotary tables and masks enter the blocks as they are.
        cast_forward_inputs=False,
    )
    mesh = data_parallel_mesh(world)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A plain sum. Forcing sum-type collectives keeps PREMUL_SUM out, which gloo lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _replicate(model: Decoder, world: World) -> DistributedDataParallel:
    device_ids = None if world.device.index is None else [world.device.index]
    wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(dist.group.WORLD, _sum_hook)
    return wrapped


def _sum_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket over processes, where DDP's own hook would take the mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
