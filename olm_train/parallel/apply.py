"""Spread a decoder over data-parallel processes: one function, fixed order.

    compute dtype -> float8 products -> activation checkpointing -> compile each block
                  -> experts dealt to ranks (matrices were cut before, see tensor.py)
                  -> FSDP2 each block, then the root -> memory for the weights -> DDP

At world size 1 nothing is wrapped. HSDP is FSDP2 over a mesh of two dimensions. The weights get
their values afterwards: drawn (`model/init.py`) or loaded.

Gradients leave the backward pass as the exact sum over processes, never as a mean: the loss is
already divided by the global count of valid labels. They are exchanged at the last micro-batch of
a step only.
"""

# Annotations are objects here, not strings: DDP inspects those of the communication hook.

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.model.decoder import Decoder
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.compiling import CompileConfig
from olm_train.parallel.config import DTYPES, DataParallelConfig
from olm_train.parallel.exchange import device_mesh
from olm_train.parallel.expert import deal_experts
from olm_train.parallel.float8 import Float8Config
from olm_train.parallel.mesh import WHOLE, Mesh
from olm_train.parallel.tensor import TensorParallel


def parallelize(
    model: Decoder,
    config: DataParallelConfig,
    world: World,
    *,
    mesh: Mesh | None = None,
    tensor: TensorParallel | None = None,
    stages: Sequence[Any] = (),
    checkpointing: ActivationCheckpointingConfig | None = None,
    compiling: CompileConfig | None = None,
    float8: Float8Config | None = None,
) -> Decoder | DistributedDataParallel:
    """Prepare `model`, built on the meta device, for training.

    `checkpointing`, `compiling` and `float8` change its blocks; None: not at all. Its parameters
    are sharded in place or left whole, and put on the device; what they hold there is undefined.
    `mesh` is that of the run; None: of `config` alone. The weights are cut over the ranks of its
    `cp`, too, and experts are dealt to those of `ep`. The matrices of the model were cut by
    `tensor`. Of a pipeline the model has the layers of its `stages`, which are what is called then.

    Returns:
        The module to call: DDP's wrapper with ddp, else `model` itself.

    Raises:
        UsageError: the configuration does not fit the world or the model, or the attention back-end
            cannot train here.
    """
    mesh = mesh or config.mesh(world.size, world.nodes)
    wraps = mesh.degree(*WHOLE.gradients) > 1
    if not wraps and config.cpu_offload:
        raise UsageError(
            "dp_config.cpu_offload has no effect on one rank, where nothing is wrapped",
            where="train_module.dp_config.cpu_offload",
            fix="start at least two ranks for the same layers, or leave it out",
        )
    model.compute_dtype = DTYPES[config.param_dtype]
    model.require_attention(world.device, model.compute_dtype, training=True)
    experts = any(part.routes for part in model.config.feed_forwards)
    if compiling is not None and experts and model.compute_dtype is torch.float32:
        raise UsageError(
            "a mixture of experts is not compiled in float32",
            where="train_module.compile_model",
            why="torch compiles grouped products in bfloat16 alone",
            fix="set compile_model: false, or dp_config.param_dtype: bfloat16",
        )
    if float8 is not None:
        float8.apply(model, world.device, model.compute_dtype)
    checkpointing = checkpointing or ActivationCheckpointingConfig()
    checkpointing.check(compiling=compiling is not None)
    roots = stages or [model]
    for root in roots:
        checkpointing.apply(root.blocks)
    if compiling is not None:
        # An exchange between ranks stays outside the graphs: its order must be that of the calls.
        alone = mesh.cp == mesh.tp == mesh.ep == 1
        compiling = replace(compiling, fullgraph=compiling.fullgraph and alone)
        for root in roots:
            compiling.apply(root.blocks, checkpointing)
    if wraps and config.shards:
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.param_dtype],
            reduce_dtype=DTYPES[config.reduce_dtype],
            # Rotary tables and masks enter the blocks as they are.
            cast_forward_inputs=False,
        )
        cuts = [] if tensor is None else [tensor.placement]
        cuts += [deal_experts(model, mesh, world)] if mesh.ep > 1 else []

        def cut(parameter: nn.Parameter) -> Any:
            return next(filter(None, (each(parameter) for each in cuts)), None)

        ranks = _device_mesh(mesh, world)
        for root in roots:
            _fully_shard(root, root.blocks, policy, config, ranks, cut)
            _prefetch(root.blocks, config.prefetch_factor)
    model.to_empty(device="cpu" if config.cpu_offload else world.device)
    for module in model.modules():  # FSDP2 offloads parameters alone
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(world.device))
    if tensor is not None:
        tensor.settle()
    if wraps and not config.shards:
        return _replicate(model, world)
    return model


def spread(
    model: nn.Module, config: DataParallelConfig, world: World, units: Sequence[nn.Module] = ()
) -> nn.Module:
    """Spread any model that has its weights; every rank calls it, and has those of rank 0 then.

    Args:
        config: what it says of dtypes, but for `reduce_dtype`, is the caller's.
        units: fsdp, hsdp: modules inside it whose weights are gathered and freed as a whole, each
            after those inside it. `prefetch_factor` counts those inside no other one, in the order
            in which the model has them; what is asked for in vain is freed after the step.

    Returns:
        The module to call: DDP's wrapper with ddp, else `model` itself.

    Raises:
        UsageError: the configuration does not fit the world.
    """
    model.to("cpu" if config.cpu_offload else world.device)
    mesh = config.mesh(world.size, world.nodes)
    if mesh.size == 1:
        return model
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(world.from_main(tensor.detach().to(world.device)))
    if not config.shards:
        return _replicate(model, world)
    policy = MixedPrecisionPolicy(reduce_dtype=DTYPES[config.reduce_dtype])
    _fully_shard(model, units, policy, config, _device_mesh(mesh, world))
    _prefetch(_outermost(model, units), config.prefetch_factor)
    return model


@contextmanager
def gradient_sync(model: nn.Module, *, last: bool, each: bool = False) -> Iterator[None]:
    """Around forward and backward of one micro-batch: exchange gradients only if it is the last.

    Until then each process sums its own, in fp32. With HSDP that holds for both exchanges, the
    reduce-scatter inside a replica and the all-reduce between replicas.

    Args:
        each: FSDP2: reduce-scatter those of each micro-batch, and sum what is at home here.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or each)
        model.set_requires_all_reduce(last)
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


def _fully_shard(
    model: nn.Module,
    units: Iterable[nn.Module],
    policy: MixedPrecisionPolicy,
    config: DataParallelConfig,
    mesh: DeviceMesh,
    cut: Callable[[nn.Parameter], Any] | None = None,
) -> None:
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for unit in units:
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=config.reshard_after_forward,
            shard_placement_fn=cut,
        )
    # The root's own parameters, embeddings and head, stay whole from forward to backward.
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, shard_placement_fn=cut)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A plain sum. Forcing sum-type collectives keeps PREMUL_SUM out, which gloo lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _device_mesh(mesh: Mesh, world: World) -> DeviceMesh:
    """Return torch's mesh of the axes that weights are cut over, as one, and of their copies if
    there are any: FSDP2 cuts over the last dimension, and keeps copies along one before it."""
    sizes = {"dp_replicate": mesh.degree(*WHOLE.copies), "dp_shard": mesh.degree(*WHOLE.sharded)}
    return device_mesh(mesh, world, sizes)


def _outermost(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the units that are inside no other one, in the order in which the model has them."""
    inside = {inner for unit in units for inner in unit.modules() if inner is not unit}
    wanted = set(units) - inside
    return [module for module in model.modules() if module in wanted]


def _prefetch(modules: Iterable[nn.Module], factor: int) -> None:
    """Have each block ask for the weights of the `factor` blocks that compute after it."""
    if not factor:
        return
    blocks: list[Any] = list(modules)  # FSDPModules; its setters are typed for lists of just those
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + factor])
        before = blocks[max(0, i - factor) : i]
        block.set_modules_to_backward_prefetch(before[::-1])


def _replicate(model: nn.Module, world: World) -> DistributedDataParallel:
    device_ids = None if world.device.index is None else [world.device.index]
    with warnings.catch_warnings():
        # torch wants another name for broadcast_buffers, which does something else
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            init_sync=False,  # each rank draws or loads the same weights later
        )
    wrapped.register_comm_hook(dist.group.WORLD, _sum_hook)
    _settle_buckets(wrapped, model)
    return wrapped


def _settle_buckets(wrapped: DistributedDataParallel, model: nn.Module) -> None:
    """Have DDP lay out its buckets now, by a backward pass that adds nothing.

    DDP orders gradients anew after its first backward pass, and the order in which ranks are
    summed depends on a gradient's place in its bucket. So without this the first step after a
    resume would round differently from the same step of an undisturbed run.
    """
    # Gradients become ready in the reverse of this order, which is that of a real backward pass.
    vars(model)["forward"] = lambda: sum(p.sum() for p in model.parameters() if p.requires_grad) * 0
    wrapped().backward()
    del vars(model)["forward"]
    model.zero_grad(set_to_none=True)


def _sum_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket over processes, where DDP's own hook would take the mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
