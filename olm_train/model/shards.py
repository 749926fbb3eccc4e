"""The parts of a tensor that are at home on this rank, and how a whole one is put into them.

A plain tensor is at home whole, and a DTensor a block of it. Of a matrix that holds several, one
below the other, and that tensor parallelism cuts by rows, a rank has a block of each:

    whole            q q q q k k v v
    ranks of tp      q q     k   v    |  q q     k   v
    shards of them   q q  |  k   v    |  q q  |  k   v

So the rows of such a DTensor are not in the order of the whole; nobody but this file knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from olm_data.errors import printable


def rows_of_rank(parts: tuple[int, ...], degree: int, rank: int) -> list[slice]:
    """Return which rows of a tensor of `parts`, one below the other, a rank of tp has."""
    firsts = accumulate(parts, initial=0)
    return [
        slice(first + rank * rows // degree, first + (rank + 1) * rows // degree)
        for first, rows in zip(firsts, parts, strict=False)
    ]


def with_parts(tensor: Tensor, parts: tuple[int, ...] | None) -> Tensor:
    """Return a tensor that knows the rows of each of its parts; None: nobody asks."""
    if parts is not None:
        tensor.parts = parts  # type: ignore[attr-defined]
    return tensor


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor that is cut as `other` is, and whose rows are in that order: a gradient, a
    moment. What torch makes of a tensor does not know its order by itself."""
    return with_parts(tensor, getattr(other, "parts", None))


def tensor_cut(tensor: Tensor) -> int | None:
    """Return the dimension of its mesh along which tensor parallelism cuts a tensor, always the
    last one; None: it does not."""
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    return len(names) - 1 if names and names[-1] == TENSOR else None


TENSOR = "tp"
"""Name of the dimension of a mesh."""
CUT_TENSORS = (
    *(".embeddings.weight", ".lm_head.weight", ".attention.w_qkv.weight", ".attention.w_qkv.bias"),
    *(".attention.w_out.weight", ".feed_forward.w_gate_up.weight", ".feed_forward.w_gate_up.bias"),
    *(".feed_forward.w_up.weight", ".feed_forward.w_up.bias", ".feed_forward.w_down.weight"),
)
"""Names of parameters that tensor parallelism cuts end so, with a dot in front."""


def at_home(tensor: Tensor) -> Tensor:
    """Return this rank's elements, as a step computes with them."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's elements, sharing their memory."""
    return at_home(tensor).detach()


Where = tuple[slice, ...]


def local_blocks(tensor: Tensor) -> list[tuple[Tensor, Where]]:
    """Return this rank's parts of `tensor`, sharing its memory, and where each lies in the whole.

    One, but of what tensor parallelism cuts by rows; empty where the tensor has fewer rows than
    there are ranks.
    """
    if not isinstance(tensor, DTensor):
        return [(tensor.detach(), tuple(slice(0, size) for size in tensor.shape))]
    held, mesh, dim = local_part(tensor), tensor.device_mesh, tensor_cut(tensor)
    if dim is None or tensor.placements[dim] == Shard(1):
        shape, offsets = compute_local_shape_and_global_offset(
            tensor.shape, mesh, tensor.placements
        )
        bounds = zip(offsets, shape, strict=True)
        return [(held, tuple(slice(first, first + size) for first, size in bounds))]
    parts: tuple[int, ...] = tensor.parts  # type: ignore[attr-defined]  # else not yet `like` any
    shards, shard = 1, 0
    for other, how in enumerate(tensor.placements[:dim]):
        if not how.is_replicate():
            shards, shard = mesh.size(other), mesh.get_local_rank(other)
    ranges = rows_of_rank(parts, mesh.size(dim), mesh.get_local_rank(dim))
    step = -(-sum(each.stop - each.start for each in ranges) // shards)  # as torch.chunk cuts
    found, at, first = list[tuple[Tensor, Where]](), 0, step * shard
    across = tuple(slice(0, size) for size in tensor.shape[1:])
    for each in ranges:
        low = max(at, first)
        at += each.stop - each.start
        high = min(at, first + step)
        if low < high:
            start = each.stop - at + low
            rows = slice(start, start + high - low)
            found.append((held[low - first : high - first], (rows, *across)))
    return found


def shown_by_block(tensor: Tensor) -> Tensor:
    """Return a tensor, of which torch's distributed checkpoint then sees each block by itself."""
    if tensor_cut(tensor) is None:
        return tensor
    assert isinstance(tensor, DTensor)
    blocks = {
        MetadataIndex("", [place.start for place in where]).offset: part
        for part, where in local_blocks(tensor)
    }
    chunks = [ChunkStorageMetadata(at, part.shape) for at, part in blocks.items() if at is not None]
    kind, shape = TensorProperties.create_from_tensor(local_part(tensor)), tensor.shape

    def items(name: str, _: Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, kind, shape),
            )
            for chunk in chunks
        ]

    for name, answer in {
        "__create_write_items__": items,
        "__create_chunk_list__": lambda: chunks,
        "__get_tensor_shard__": lambda index: blocks[index.offset],
    }.items():
        setattr(tensor._local_tensor, name, answer)  # a DTensor asks it first
    return tensor


@torch.no_grad()
def assign(target: Tensor, full: Tensor) -> None:
    """Copy a full tensor into `target`; of a sharded target each process keeps its own part."""
    for part, where in local_blocks(target):
        part.copy_(full[where])


def is_first_holder(tensor: Tensor, *, main: bool) -> bool:
    """Whether this rank is the first of those that hold the same elements of a tensor.

    Args:
        tensor: whole or sharded.
        main: whether this is rank 0, which is the first holder of a whole one.
    """
    if not isinstance(tensor, DTensor):
        return main
    place = tensor.device_mesh.get_coordinate()
    return place is not None and all(
        place[dim] == 0
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


State = Mapping[str, Any]
"""Tensors, or entries of an index that stand for them, and plain values by name."""
Shapes = Mapping[str, list[int] | None]
"""Of the tensors of a state by name; None: it is a plain value."""


def shapes(state: State) -> Shapes:
    """Return the shapes of a state."""
    return {n: list(leaf.shape) if hasattr(leaf, "shape") else None for n, leaf in state.items()}


def misfits(here: Shapes, given: Shapes) -> list[str]:
    """Return in what a given state is not that of here, a sentence for each name."""

    def said(shape: list[int] | None) -> str:
        return "is a plain value" if shape is None else f"has shape {shape}"

    return [
        *(f"missing {name}" for name in sorted(here.keys() - given.keys())),
        *(f"unexpected {printable(name)}" for name in sorted(given.keys() - here.keys())),
        *(
            f"{name} {said(given[name])}, here it {said(here[name])}"
            for name in sorted(here.keys() & given.keys())
            if here[name] != given[name]
        ),
    ]
