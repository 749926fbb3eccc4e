"""Work on whole matrices, divided over ranks: each matrix is worked on by one rank alone.

    this rank's rows --all-to-all in the replica--> the whole matrix, on the rank that works on it
      result --all-to-all in the replica--> this rank's rows of it --all-gather--> all replicas

Matrices are taken in rounds, one a rank, the costly ones first, so that what a round holds costs
about the same. The exchanges of the rounds before and after run while one is worked on. Without
shards or without replicas (FSDP2, DDP) one of the two exchanges is none; on one rank both are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from olm_train.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The ranks that hold a parameter: `replicas` copies, each cut by rows over `shards` ranks.

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
        mesh = parameter.device_mesh
        options: dict[str, Any] = {}
        for dim, placement in enumerate(parameter.placements):
            name = "replica" if placement.is_replicate() else "shard"
            assert placement.is_replicate() or placement.is_shard(0), placement
            assert name not in options, parameter.placements
            options |= {
                f"{name}s": mesh.size(dim),
                name: mesh.get_local_rank(dim),
                f"{name}_group": mesh.get_group(dim),
            }
        return cls(**options)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards


@dataclass(frozen=True)
class Matrix:
    """Rows `first` to `stop` of a parameter of `rows` rows, each of `columns`."""

    rows: int
    columns: int
    first: int
    stop: int

    def part(self, shard: int, shards: int) -> slice:
        """Return which rows of the matrix a shard of its parameter holds."""
        step = -(-self.rows // shards)  # as torch.chunk cuts
        low, high = (min(max(at * step, self.first), self.stop) for at in (shard, shard + 1))
        return slice(low - self.first, high - self.first)

    def local(self, shard: int, shards: int) -> slice:
        """Return where those rows lie in that shard of the parameter."""
        part, start = self.part(shard, shards), min(shard * -(-self.rows // shards), self.rows)
        return slice(part.start + self.first - start, part.stop + self.first - start)


class Division:
    """Which rank works on which matrix, and the exchanges.

    Args:
        matrices: the same on each rank.
        costs: of working on each, in any unit.
        grid: the ranks that hold them.
        like: an empty tensor of the dtype and on the device of what is exchanged.
    """

    def __init__(
        self, matrices: Sequence[Matrix], costs: Sequence[int], grid: Grid, like: Tensor
    ) -> None:
        self.matrices, self.grid, self._like = list(matrices), grid, like
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
            work: makes of a whole matrix another one of the same shape.
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
        theirs = [self._size(item, grid.shard) for item in beside]
        ours = [self._size(mine, shard) for shard in range(grid.shards)]
        sent = [rows(item).to(self._like.dtype).flatten() for item in beside if item is not None]
        whole, waiting = self._all_to_all(sent, theirs, ours)
        yield
        waiting()
        results = []
        if mine is not None:
            matrix = self.matrices[mine]
            turned = work(mine, whole.view(matrix.stop - matrix.first, matrix.columns))
            results.append(turned.to(self._like.dtype).flatten())
        found, waiting = self._all_to_all(results, ours, theirs)
        yield
        waiting()
        length, everywhere, waiting = self._all_gather(found, items)
        yield
        waiting()
        for replica in range(grid.replicas):
            at = replica * length
            for item in items[replica * grid.shards :][: grid.shards]:
                size = self._size(item, grid.shard)
                if item is not None and size:
                    part = everywhere[at : at + size]
                    use(item, part.view(-1, self.matrices[item].columns))
                at += size

    def _size(self, item: int | None, shard: int) -> int:
        """Elements of a matrix that a shard holds."""
        if item is None:
            return 0
        matrix = self.matrices[item]
        part = matrix.part(shard, self.grid.shards)
        result: int = (part.stop - part.start) * matrix.columns
        return result

    def _all_to_all(
        self, parts: list[Tensor], sent: list[int], received: list[int]
    ) -> tuple[Tensor, Callable[[], object]]:
        given = torch.cat(parts) if parts else self._like
        if self.grid.shards == 1:
            return given, _nothing
        taken = self._like.new_empty(sum(received))
        work = dist.all_to_all_single(
            taken, given, received, sent, group=self.grid.shard_group, async_op=True
        )
        return taken, _Kept(work, given)

    def _all_gather(
        self, mine: Tensor, items: list[int | None]
    ) -> tuple[int, Tensor, Callable[[], object]]:
        """Return the elements a replica has room for, those of all replicas, and how to wait."""
        grid = self.grid
        if grid.replicas == 1:
            return mine.numel(), mine, _nothing
        length = max(
            sum(self._size(item, grid.shard) for item in items[at : at + grid.shards])
            for at in range(0, grid.size, grid.shards)
        )
        padded = mine.new_zeros(length)
        padded[: mine.numel()] = mine
        taken = mine.new_empty(grid.replicas * length)
        parts = list(taken.view(grid.replicas, length))
        work = dist.all_gather(parts, padded, group=grid.replica_group, async_op=True)
        return length, taken, _Kept(work, padded)


class _Kept:
    """Waits for an exchange; what it sends is kept until then."""

    def __init__(self, work: dist.Work, given: Tensor) -> None:
        self._work, self._given = work, given

    def __call__(self) -> object:
        return self._work.wait()


def _nothing() -> None:
    """There is no exchange to wait for."""
