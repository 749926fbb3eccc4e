"""Dion (Ahn et al., 2025): orthonormal updates of low rank for the blocks' matrices, with feedback.

    B = momentum + gradient                       [m, n]
    P = orthonormal basis of B Q                  [m, r]   one step of a power iteration
    R = B^T P                                     [n, r]
    momentum = B - (1 - mu) P R^T                          what P has not seen stays for later steps
    Q = columns of R, each of length 1            [n, r]   where the next step begins
    weight -= rate * scale * P Q^T

Matrices are divided over the ranks as Muon's are (`muon.py`): one rank alone works on each, so
weights do not depend on how they are sharded. What goes there is B and Q; what comes back is the
update, P R^T and Q. All else takes AdamW.

Q is kept as its transpose, [r, n] for each matrix of a parameter, one below the other, and is cut
over the ranks as the parameter is: a checkpoint of one layout is read by any other. Where tensor
parallelism cuts the parameter, Q's rows are cut over the same ranks, whatever matrix they are of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal, cast

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from olm_train.distributed.world import World
from olm_train.model.init import draw_normal
from olm_train.model.shards import local_part, tensor_cut
from olm_train.optim.division import Division, Grid, Matrix, Piece, rows_of
from olm_train.optim.groups import ParamGroup
from olm_train.optim.half import DTYPES
from olm_train.optim.muon import MatrixConfig, Muon, scale

EPSILON = 1e-8
"""Added to the lengths of the columns of R."""


@dataclass(frozen=True)
class Stack(Matrix):
    """Matrices that are exchanged together: what a shard holds of each in turn, as one column."""

    of: tuple[Matrix, ...] = ()

    @classmethod
    def made(cls, *of: Matrix) -> Stack:
        """Return the stack of some matrices."""
        size = sum((each.stop - each.first) * each.columns for each in of)
        return cls(size, 1, 0, size, of=of)

    def held(self, shard: int, shards: int) -> int:
        return sum(self.sizes(shard, shards))

    def sizes(self, shard: int, shards: int) -> list[int]:
        """Return how many elements a shard holds of each."""
        return [each.held(shard, shards) for each in self.of]

    def taken_apart(self, whole: Tensor, shards: int) -> list[Tensor]:
        """Return each whole matrix, of what came from all shards."""
        sizes = [size for shard in range(shards) for size in self.sizes(shard, shards)]
        held, count = whole.flatten().split(sizes), len(self.of)
        return [m.join(shards, torch.cat(held[n::count])) for n, m in enumerate(self.of)]

    def put_together(self, wholes: Sequence[Tensor], shards: int) -> Tensor:
        """Return what goes to all shards, of whole matrices."""
        each = [
            matrix.split(shards, whole).split([matrix.held(n, shards) for n in range(shards)])
            for whole, matrix in zip(wholes, self.of, strict=True)
        ]
        return torch.cat([part for shard in zip(*each, strict=True) for part in shard])


class Dion(Muon):
    """Dion on groups with `"parts"`, AdamW on the others.

    Args:
        groups: as `Muon` has them, with "rank_fraction" instead of "nesterov".
        dtype: of momentum and moments; bfloat16 is rounded by chance. Q is fp32.
    """

    def __init__(self, groups: list[ParamGroup], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(groups, dtype)
        self._bases: dict[tuple[Tensor, int], tuple[int, int, int]] = {}
        number, drawn = sum(len(group["params"]) for group in self.param_groups), {}
        for group in self.param_groups:
            each = zip(group["params"], group["names"], group.get("parts", ()), strict=False)
            for parameter, name, parts in each:
                *experts, _, columns = parameter.shape
                ranks = [rank_of(rows, columns, group["rank_fraction"]) for rows in parts]
                firsts = zip(parts, accumulate(parts, initial=0), strict=False)
                ends = accumulate(ranks, initial=0)
                for (_, first), rank, at in zip(firsts, ranks, ends, strict=False):
                    number += 1
                    self._bases[parameter, first] = number, at, at + rank
                shape = (*experts, sum(ranks) // math.prod(experts), columns)
                drawn[f"{name}.Q"] = self.state[parameter]["Q"] = _cut_as(parameter, shape)
        # of a pipeline other ranks have those on the device "meta"
        if here := {name: basis for name, basis in drawn.items() if not basis.is_meta}:
            draw_normal(here, 0)

    def _accumulate(self, *_: object) -> None:
        """Leave the momentum: what is taken out of it is known when the matrix has been turned."""

    def _division(self, pieces: list[Piece], grid: Grid, like: Tensor) -> Division:
        pairs = [(piece.matrix, self._basis(piece).matrix) for piece in pieces]
        both = cast("list[tuple[Matrix, Matrix]]", pairs)  # of matrices that are on this rank
        costs = [_cost(weight, basis) for weight, basis in both]
        given = [Stack.made(weight, basis) for weight, basis in both]
        made = [Stack.made(weight, weight, basis) for weight, basis in both]
        return Division(given, costs, grid, like, made)

    def _basis(self, piece: Piece) -> Piece:
        """Return the rows of Q that belong to a matrix."""
        _, first, stop = self._bases[piece.parameter, piece.first]
        return Piece(piece.group, self.state[piece.parameter]["Q"], first, stop)

    def _turn(self, pieces: list[Piece], mesh: object) -> None:
        division = self._divide(pieces, mesh)
        grid = division.grid
        stacks = cast("list[Stack]", division.made)

        def kept(number: int) -> tuple[Tensor, Tensor, Tensor]:
            """Return this rank's rows of momentum, weight and Q, to be changed in place."""
            piece, (weight, _, basis) = pieces[number], stacks[number].of
            state = self.state[piece.parameter]
            where = weight.local(grid.shard, grid.shards)
            momentum, weights = (
                rows_of(each)[where] for each in (state["momentum_buffer"], piece.parameter)
            )
            return momentum, weights, rows_of(state["Q"])[basis.local(grid.shard, grid.shards)]

        def added(number: int, momentum: Tensor) -> Tensor:
            """Return this rank's rows of B."""
            where = stacks[number].of[0].local(grid.shard, grid.shards)
            return rows_of(pieces[number].parameter.grad)[where] + momentum

        def rows(number: int) -> Tensor:
            momentum, _, basis = kept(number)
            return torch.cat((added(number, momentum).flatten(), basis.flatten()))

        def turn(number: int, whole: Tensor) -> Tensor:
            given = cast("Stack", division.matrices[number])
            b, basis = given.taken_apart(whole.float(), grid.shards)  # [m, n], [r, n]
            p = torch.linalg.qr(b @ basis.T).Q  # [m, r]
            r = p.T @ b  # [r, n]
            lengths = r.norm(dim=1, keepdim=True)
            turned = r / (lengths + EPSILON)
            factor = scale(b.shape, pieces[number].group["adjust_lr"])
            basis = torch.where(lengths > 0, turned, basis)  # without a gradient Q stays
            return stacks[number].put_together((p @ turned * factor, p @ r, basis), grid.shards)

        def use(number: int, held: Tensor) -> None:
            group, stack = pieces[number].group, stacks[number]
            parts = zip(held.split(stack.sizes(grid.shard, grid.shards)), stack.of, strict=True)
            update, seen, turned = (part.view(-1, matrix.width) for part, matrix in parts)
            momentum, weight, basis = kept(number)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update.to(weight.dtype), alpha=-group["lr"])
            basis.copy_(turned)
            left = added(number, momentum).sub_(seen, alpha=1 - group["momentum"])
            drawn_by, _, _ = self._bases[pieces[number].parameter, pieces[number].first]
            self._rounding.keep(left, momentum, drawn_by, group)

        division.run(rows, turn, use)


@dataclass(frozen=True, kw_only=True)
class DionConfig(MatrixConfig):
    """Dion for the matrices of the blocks; embeddings, head, routers and vectors by AdamW.

    Attributes:
        rank_fraction: rank of an update, a share of the matrix's smaller side.
    """

    name: Literal["dion"] = "dion"
    rank_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.25

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Dion:
        split = self._split(model, groups, rank_fraction=self.rank_fraction)
        return Dion(split, DTYPES[self.dtype])


def rank_of(rows: int, columns: int, fraction: float) -> int:
    """Return the rank of the updates of a matrix."""
    return math.ceil(fraction * min(rows, columns))


def _cost(weight: Matrix, basis: Matrix) -> int:
    """Return the multiplications of a step: four products, and the basis."""
    rows, rank = weight.stop - weight.first, basis.stop - basis.first
    return rows * rank * (4 * weight.columns + 2 * rank)


def _cut_as(parameter: Tensor, shape: Sequence[int]) -> Tensor:
    """Return fp32 zeros, cut over the ranks as a parameter is, and beside it."""
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    if tensor_cut(parameter) is not None:  # the rows of a basis are cut over all shards at once
        mesh, placements = _beside(parameter)
    here, _ = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    zeros = torch.zeros(here, device=local_part(parameter).device)  # on the host with cpu_offload
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), zeros.dtype)
    return DTensor(zeros, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def _beside(parameter: DTensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return how rows are cut over the shards of the `Grid` of a parameter."""
    grid, mesh = Grid.of(parameter, World()), parameter.device_mesh
    assert grid.shard_group is not None
    if grid.replica_group is None:
        return DeviceMesh.from_group(grid.shard_group, mesh.device_type), (Shard(0),)
    groups, ranks = [grid.replica_group, grid.shard_group], mesh.mesh.view(grid.replicas, -1)
    names = ("dp_replicate", "dp_shard")
    both = DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=names)
    return both, (Replicate(), Shard(0))
