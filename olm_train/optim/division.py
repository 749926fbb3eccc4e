"""Which rank works on which matrix, for optimisers that turn whole ones.

Each whole matrix is worked on by one rank alone.

    this rank's rows --all-to-all in the replica--> the whole matrix, on the rank that works on it
      result --all-to-all in the replica--> this rank's rows of it --all-gather--> all replicas

Matrices are taken in rounds, one a rank, the costly ones first, so that what a round holds costs
about the same. The exchanges of the rounds before and after run while one is worked on. Without
shards or without replicas (FSDP2, DDP) one of the two exchanges is none; on one rank both are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from olm_train.distributed.world import World
from olm_train.model.shards import local_part, tensor_cut
from olm_train.optim.groups import ParamGroup


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The ranks that hold a parameter: `replicas` copies, each cut by rows over `shards` ranks.

    Of experts that are dealt to ranks, those that hold the same ones. Of what tensor parallelism
    cuts, its ranks are shards too: those of one shard of the others come one after another.

    Attributes:
        replica, shard: place of this rank.
        replica_group, shard_group: ranks with the same rows; ranks of one copy. None where there is
            one rank.
    """

    replicas: int = 1
    shards: int = 1
    replica: int = 0
    shard: int = 0
    replica_group: dist.ProcessGroup | None = None
    shard_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, parameter: Tensor, world: World) -> Grid:
        """Return that of a parameter: FSDP2's is a DTensor, DDP's a plain tensor on each rank."""
        if not isinstance(parameter, DTensor):
            if world.size == 1:
                return cls()
            return cls(replicas=world.size, replica=world.rank, replica_group=dist.group.WORLD)
        mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
        axes: dict[str, list[str]] = {"replica": [], "shard": []}
        for dim, placement in enumerate(parameter.placements):
            if dim != _dealt_along(parameter):
                axes["replica" if placement.is_replicate() else "shard"].append(names[dim])
        options: dict[str, Any] = {}
        for name, along in axes.items():
            if along:
                ranks = mesh[tuple(along)]._flatten() if len(along) > 1 else mesh[along[0]]
                options |= {
                    f"{name}s": ranks.size(),
                    name: ranks.get_local_rank(),
                    f"{name}_group": ranks.get_group(),
                }
        return cls(**options)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards


@dataclass(frozen=True)
class Matrix:
    """Rows `first` to `stop` of a parameter of `rows` rows, each of `columns`.

    Shards of the parameter are cut between groups of `together` rows alone: those of an expert.
    Or each of `above` others, which lie in the shard before it, is cut as it is itself.
    """

    rows: int
    columns: int
    first: int
    stop: int
    together: int = 1
    above: int = 0

    def part(self, shard: int, shards: int) -> slice:
        """Return which rows of the matrix a shard of its parameter holds."""
        step = self._step(shards)
        low, high = (min(max(at * step, self.first), self.stop) for at in (shard, shard + 1))
        return slice(low - self.first, high - self.first)

    def local(self, shard: int, shards: int) -> slice:
        """Return where those rows lie in that shard of the parameter."""
        part, step = self.part(shard, shards), self._step(shards)
        start = self.first - min(shard * step, self.rows) + self.above * step
        return slice(part.start + start, part.stop + start)

    @property
    def width(self) -> int:
        """Columns of a shard."""
        return self.columns

    def held(self, shard: int, shards: int) -> int:
        """Return how many elements a shard holds."""
        part = self.part(shard, shards)
        return (part.stop - part.start) * self.width

    def join(self, shards: int, flat: Tensor) -> Tensor:
        """Return the matrix, of what its shards hold, one after another."""
        return flat.view(self.stop - self.first, self.columns)

    def split(self, shards: int, whole: Tensor) -> Tensor:
        """Return what its shards hold, one after another, of the matrix."""
        return whole.flatten()

    def _step(self, shards: int) -> int:
        return -(-self.rows // self.together // shards) * self.together  # as torch.chunk cuts


@dataclass(frozen=True)
class CutMatrix(Matrix):
    """A matrix that tensor parallelism cuts over `degree` ranks, by columns or by rows.

    Shard s is that of rank s % degree.
    """

    degree: int = 1
    by_columns: bool = False

    @property
    def width(self) -> int:
        return self.columns // self.degree if self.by_columns else self.columns

    def part(self, shard: int, shards: int) -> slice:
        within = self._of_rank.part(shard // self.degree, shards // self.degree)
        if self.by_columns:
            return within
        above = shard % self.degree * (self.stop - self.first) // self.degree
        return slice(above + within.start, above + within.stop)

    def local(self, shard: int, shards: int) -> slice:
        return self._of_rank.local(shard // self.degree, shards // self.degree)

    def join(self, shards: int, flat: Tensor) -> Tensor:
        whole = flat.new_empty(self.stop - self.first, self.columns)
        blocks = self._blocks(shards, whole)
        sizes = [block.numel() for block in blocks]
        for block, part in zip(blocks, flat.split(sizes), strict=True):
            block.copy_(part.view_as(block))
        return whole

    def split(self, shards: int, whole: Tensor) -> Tensor:
        return torch.cat([block.flatten() for block in self._blocks(shards, whole)])

    @property
    def _of_rank(self) -> Matrix:
        """What a rank has of it, in its rows of the parameter."""
        if self.by_columns:
            return Matrix(self.rows, self.width, self.first, self.stop)
        rows, first, stop = (n // self.degree for n in (self.rows, self.first, self.stop))
        return Matrix(rows, self.columns, first, stop)

    def _blocks(self, shards: int, whole: Tensor) -> list[Tensor]:
        each = range(shards)
        if not self.by_columns:
            return [whole[self.part(shard, shards)] for shard in each]
        columns = whole.split(self.width, 1)
        return [columns[shard % self.degree][self.part(shard, shards)] for shard in each]


class Division:
    """Which rank works on which matrix, and the exchanges.

    Args:
        matrices: the same on each rank.
        costs: of working on each, in any unit.
        grid: the ranks that hold them.
        like: an empty tensor of the dtype and on the device of what is exchanged.
        made: what is made of each; default: another matrix of the same shape.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        costs: Sequence[int],
        grid: Grid,
        like: Tensor,
        made: Sequence[Matrix] | None = None,
    ) -> None:
        self.matrices, self.made = list(matrices), list(made or matrices)
        self.grid, self._like = grid, like
        order: list[int | None] = [*sorted(range(len(costs)), key=lambda i: -costs[i])]
        order += [None] * (-len(order) % grid.size)
        self.rounds = [order[at : at + grid.size] for at in range(0, len(order), grid.size)]

    def run(
        self,
        rows: Callable[[int], Tensor],
        work: Callable[[int, Tensor], Tensor],
        use: Callable[[int, Tensor], None],
    ) -> None:
        """Work on every matrix; all ranks of the grid together.

        Args:
            rows: returns this rank's rows of a matrix, by its number.
            work: makes of a whole matrix another one, of the shape in `made`.
            use: is given this rank's rows of the result.
        """
        running: list[Generator[None]] = []
        over = object()
        waiting = list(self.rounds)
        while waiting or running:
            if waiting:
                running.insert(0, self._round(waiting.pop(0), rows, work, use))
            running = [each for each in running if next(each, over) is not over]

    def _round(
        self,
        items: list[int | None],
        rows: Callable[[int], Tensor],
        work: Callable[[int, Tensor], Tensor],
        use: Callable[[int, Tensor], None],
    ) -> Generator[None]:
        """Take one round; pauses where an exchange is under way."""
        grid = self.grid
        beside = items[grid.replica * grid.shards :][: grid.shards]  # of this replica, by shard
        mine = beside[grid.shard]
        theirs, ours = self._sizes(self.matrices, beside)
        sent = [rows(item).to(self._like.dtype).flatten() for item in beside if item is not None]
        whole, waiting = self._all_to_all(sent, theirs, ours)
        yield
        waiting()
        results = []
        if mine is not None:
            matrix = self.matrices[mine]
            turned = work(mine, matrix.join(grid.shards, whole))
            results.append(self.made[mine].split(grid.shards, turned.to(self._like.dtype)))
        theirs, ours = self._sizes(self.made, beside)
        found, waiting = self._all_to_all(results, ours, theirs)
        yield
        waiting()
        length, everywhere, waiting = self._all_gather(found, items)
        yield
        waiting()
        for replica in range(grid.replicas):
            at = replica * length
            for item in items[replica * grid.shards :][: grid.shards]:
                size = self._size(self.made, item, grid.shard)
                if item is not None and size:
                    part = everywhere[at : at + size]
                    use(item, part.view(-1, self.made[item].width))
                at += size

    def _sizes(self, of: list[Matrix], beside: list[int | None]) -> tuple[list[int], list[int]]:
        """Elements that this shard has of each of a round, and that each has of this one's."""
        shard = self.grid.shard
        theirs = [self._size(of, item, shard) for item in beside]
        return theirs, [self._size(of, beside[shard], each) for each in range(self.grid.shards)]

    def _size(self, of: list[Matrix], item: int | None, shard: int) -> int:
        """Elements of a matrix that a shard holds."""
        return 0 if item is None else of[item].held(shard, self.grid.shards)

    def _all_to_all(
        self, parts: list[Tensor], sent: list[int], received: list[int]
    ) -> tuple[Tensor, Callable[[], object]]:
        given = torch.cat(parts) if parts else self._like
        if self.grid.shards == 1:
            return given, _wait
        taken = self._like.new_empty(sum(received))
        work = dist.all_to_all_single(
            taken, given, received, sent, group=self.grid.shard_group, async_op=True
        )
        return taken, partial(_wait, work, given)

    def _all_gather(
        self, mine: Tensor, items: list[int | None]
    ) -> tuple[int, Tensor, Callable[[], object]]:
        """Return the elements a replica has room for, those of all replicas, and how to wait."""
        grid = self.grid
        if grid.replicas == 1:
            return mine.numel(), mine, _wait
        length = max(
            sum(self._size(self.made, item, grid.shard) for item in items[at : at + grid.shards])
            for at in range(0, grid.size, grid.shards)
        )
        padded = mine.new_zeros(length)
        padded[: mine.numel()] = mine
        taken = mine.new_empty(grid.replicas * length)
        parts = list(taken.view(grid.replicas, length))
        work = dist.all_gather(parts, padded, group=grid.replica_group, async_op=True)
        return length, taken, partial(_wait, work, padded)


def _wait(work: dist.Work | None = None, kept: Tensor | None = None) -> None:
    """Wait for an exchange, if there is one; what it sends is kept until then."""
    if work is not None:
        work.wait()


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter that are one matrix, and the options of its group."""

    group: ParamGroup
    parameter: Tensor
    first: int
    stop: int

    @property
    def matrix(self) -> Matrix | None:
        """Where the rows lie; None: in an expert that is dealt to other ranks."""
        *experts, rows, columns = self.parameter.shape
        dim, cut = _dealt_along(self.parameter), tensor_cut(self.parameter)
        if cut is not None:
            assert isinstance(self.parameter, DTensor)
            degree, how = self.parameter.device_mesh.size(cut), self.parameter.placements[cut]
            where = (rows, columns, self.first, self.stop)
            return CutMatrix(*where, degree=degree, by_columns=how == Shard(1))
        if dim is None:
            together = rows if experts else 1
            return Matrix(math.prod(experts) * rows, columns, self.first, self.stop, together)
        assert isinstance(self.parameter, DTensor)
        mesh = self.parameter.device_mesh
        here, first = experts[0] // mesh.size(dim), self.first % rows
        expert = self.first // rows - mesh.get_local_rank(dim) * here
        stop = first + self.stop - self.first
        return Matrix(rows, columns, first, stop, above=expert) if 0 <= expert < here else None


def _dealt_along(parameter: Tensor) -> int | None:
    """Return the dimension of its mesh along which a parameter's experts are dealt to ranks; None:
    they are not."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return names.index("ep") if names and "ep" in names else None


def rows_of(tensor: Tensor | None) -> Tensor:
    """Return this rank's rows, a view; of experts one below the other."""
    assert tensor is not None
    return local_part(tensor).flatten(0, -2)
