"""Muon (Jordan et al., 2024) for the matrices of the blocks but routers, AdamW for all else.

    gradient -> momentum (sharded as the weight is) -> whole matrix, on one of the ranks
             -> nearest orthogonal matrix -> scaled -> each rank's share of it -> weight

The matrices are divided over the ranks; what one rank computes all others take, so
weights do not depend on how they are sharded. A parameter that holds several matrices, such as the
rows of queries, keys and values, or those of experts, is orthogonalised part by part.

The division: each whole matrix is worked on by one rank alone.

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
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from olm_data.config.hints import NonNegativeFloat, PositiveFloat
from olm_train.distributed.world import World
from olm_train.model.layers import Linear
from olm_train.model.mixture import Experts
from olm_train.model.shards import tensor_cut
from olm_train.optim.base import Decay, OptimConfig
from olm_train.optim.groups import ParamGroup
from olm_train.optim.half import (
    DTYPES,
    MomentDtype,
    Rounding,
    adam_kernel,
    local,
    numbered,
    step_adam,
)


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
        if item is None:
            return 0
        matrix = of[item]
        part = matrix.part(shard, self.grid.shards)
        result: int = (part.stop - part.start) * matrix.width
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
            sum(self._size(self.made, item, grid.shard) for item in items[at : at + grid.shards])
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


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration (Jordan et al., 2024)."""
STEPS = 5


class Muon(Optimizer):
    """Muon on groups with `"parts"`, AdamW on the others.

    Args:
        groups: with "params", "lr", "weight_decay"; with "momentum", "nesterov", "adjust_lr" and
            "parts", a list of the row counts inside each matrix; or with "betas" and "eps".
        dtype: of momentum and moments; bfloat16 is rounded by chance.

    Attributes:
        world: the ranks that hold the parameters, over which the work is divided; at first this one
            alone.
        reduced: matrices are exchanged and orthogonalised in bfloat16 on a CPU too, as on CUDA.
    """

    def __init__(self, groups: list[ParamGroup], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(groups, {})
        self.world, self.reduced = World(), False
        self._half, self._rounding = dtype is torch.bfloat16, Rounding(self.param_groups, dtype)
        self._divided: dict[object, tuple[object, Division]] = {}
        for group in self.param_groups:
            names = ["momentum_buffer"] if "parts" in group else ["exp_avg", "exp_avg_sq"]
            for parameter in group["params"]:
                state = {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
                if "parts" not in group:
                    state["step"] = torch.zeros((), device=parameter.device)
                self.state[parameter] = state

    def join(self, world: World, *, reduced: bool) -> None:
        """Share the work with the ranks that hold the parameters, see the attributes."""
        self.world, self.reduced = world, reduced

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step; with several ranks, all of them together."""
        assert closure is None
        for number, group, parameter, gradient in numbered(self.param_groups):
            state = self.state[parameter]
            if "parts" in group:
                self._accumulate(state["momentum_buffer"], gradient, number, group)
            elif self._half:
                generator = self._rounding.seed(number, group, parameter.device)
                step_adam(parameter, gradient, state, group, generator, fused=True, decoupled=True)
        for group in self.param_groups:
            if "parts" not in group and not self._half:
                self._adamw(group)
        pieces: dict[object, list[Piece]] = {}  # by the ranks that hold them
        for group in self.param_groups:
            for parameter, parts in zip(group["params"], group.get("parts", ()), strict=False):
                if parameter.grad is None:
                    continue
                alike = pieces.setdefault(getattr(parameter, "device_mesh", None), [])
                ends = accumulate(parts, initial=0)
                each = zip(parts, ends, strict=False)
                found = [Piece(group, parameter, first, first + rows) for rows, first in each]
                alike += [piece for piece in found if piece.matrix is not None]
        for mesh, alike in pieces.items():
            self._turn(alike, mesh)

    def _accumulate(self, kept: Tensor, gradient: Tensor, number: int, group: ParamGroup) -> None:
        """Take a gradient into the momentum."""
        momentum = kept.to(gradient.dtype)  # itself, where it is fp32
        momentum.lerp_(gradient, 1 - group["momentum"])
        self._rounding.keep(momentum, kept, number, group)

    def _turn(self, pieces: list[Piece], mesh: object) -> None:
        """Take the step of matrices that the same ranks hold; these together."""
        division = self._divide(pieces, mesh)
        grid = division.grid

        def update(number: int) -> Tensor:
            piece, where = pieces[number], division.matrices[number].local(grid.shard, grid.shards)
            gradient = rows_of(piece.parameter.grad)[where]
            momentum = rows_of(self.state[piece.parameter]["momentum_buffer"])[where]
            momentum = momentum.to(gradient.dtype)
            if not piece.group["nesterov"]:
                return momentum
            return gradient.lerp(momentum, piece.group["momentum"])

        def turn(number: int, whole: Tensor) -> Tensor:
            whole = whole.bfloat16() if self.reduced else whole
            return orthogonalise(whole).mul_(scale(whole.shape, pieces[number].group["adjust_lr"]))

        def use(number: int, rows: Tensor) -> None:
            piece, where = pieces[number], division.matrices[number].local(grid.shard, grid.shards)
            weight = rows_of(piece.parameter)[where]
            weight.mul_(1 - piece.group["lr"] * piece.group["weight_decay"])
            weight.add_(rows.to(weight.dtype), alpha=-piece.group["lr"])

        division.run(update, turn, use)

    def _divide(self, pieces: list[Piece], mesh: object) -> Division:
        """Return who does what; made anew where other parameters have a gradient."""
        key = tuple((id(piece.parameter), piece.first) for piece in pieces)
        if self._divided.get(mesh, (None,))[0] != key:
            first = pieces[0].parameter
            reduced = first.is_cuda or self.reduced
            like = rows_of(first).new_empty(0, dtype=torch.bfloat16 if reduced else None)
            self._divided[mesh] = key, self._division(pieces, Grid.of(first, self.world), like)
        return self._divided[mesh][1]

    def _division(self, pieces: list[Piece], grid: Grid, like: Tensor) -> Division:
        matrices = [found for piece in pieces if (found := piece.matrix) is not None]
        costs = [cost(matrix.stop - matrix.first, matrix.columns) for matrix in matrices]
        return Division(matrices, costs, grid, like)

    def _adamw(self, group: ParamGroup) -> None:
        found = [p for p in group["params"] if p.grad is not None]
        if not found:
            return
        states = [self.state[p] for p in found]
        means, squares, steps = (
            [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        gradients = [p.grad for p in found]
        adam_kernel(group, found, gradients, (means, squares), steps, fused=True, decoupled=True)


@dataclass(frozen=True, kw_only=True)
class MatrixConfig(OptimConfig):
    """Options of optimisers of the blocks' matrices; all else is AdamW's.

    Attributes:
        lr: peak learning rate of both.
        betas: decay rates of the moments of AdamW, which takes embeddings, head, routers and
            vectors.
        eps: of AdamW: added to the root of the second moment.
        mu: momentum of matrices.
        dtype: of momentum and moments; bfloat16 takes half the memory, and is rounded by chance.
            Q of `dion` stays float32.
        adjust_lr: `rms_norm` gives updates the size that AdamW's have, so that both take one rate
            (Liu et al., 2025); `spectral_norm` scales by the square root of rows / columns, where
            that is above 1; `none` leaves the orthogonal matrix as it is.
    """

    lr: NonNegativeFloat = 1e-3
    eps: PositiveFloat = 1e-8
    mu: Decay = 0.95
    dtype: MomentDtype = "float32"
    adjust_lr: Literal["rms_norm", "spectral_norm", "none"] = "rms_norm"

    group_options = ("betas", "eps", "mu")

    def _split(
        self, model: nn.Module, groups: list[ParamGroup], **options: Any
    ) -> list[ParamGroup]:
        """Return groups of matrices, with "parts" and `options`, and groups of all else."""
        inner = {
            f"{name}.weight": module.parts
            for name, module in model.named_modules()
            if isinstance(module, Linear) and name.startswith("blocks.")
        } | {
            f"{name}.{leaf}": parts
            for name, module in model.named_modules()
            if isinstance(module, Experts)
            for leaf, parts in module.parts.items()
        }
        split: list[ParamGroup] = []
        for group in groups:
            mu = group.pop("mu", self.mu)
            by_matrix = {"momentum": mu, "adjust_lr": self.adjust_lr, **options}
            by_adamw = {"betas": self.betas, "eps": self.eps}
            pairs = list(zip(group["names"], group["params"], strict=True))
            for inside, of_kind in ((True, by_matrix), (False, by_adamw)):
                chosen = [(name, p) for name, p in pairs if (name in inner) is inside]
                if not chosen:
                    continue
                names, parameters = zip(*chosen, strict=True)
                made = {**of_kind, **group, "names": list(names), "params": list(parameters)}
                if inside:
                    made["parts"] = [inner[name] for name in names]
                split.append(made)
        return split


@dataclass(frozen=True, kw_only=True)
class MuonConfig(MatrixConfig):
    """Muon for the matrices of the blocks; embeddings, head, routers and vectors by AdamW.

    Attributes:
        nesterov: look ahead by one step of the momentum.
    """

    name: Literal["muon"] = "muon"
    nesterov: bool = True

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Muon:
        split = self._split(model, groups, nesterov=self.nesterov)
        return Muon(split, DTYPES[self.dtype])


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
    return local(tensor).flatten(0, -2)


def cost(rows: int, columns: int) -> int:
    """Return the multiplications of `orthogonalise`."""
    short, long = sorted((rows, columns))
    return STEPS * short * short * (2 * long + short)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return nearly the nearest orthogonal matrix: singular values between about 0.7 and 1.2.

    Five steps of a quintic Newton-Schulz iteration, in bfloat16 on CUDA and in the matrix's own
    dtype elsewhere.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        # sums within the products: a kernel less each, and on CUDA in fp32 before they are rounded
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def scale(shape: Sequence[int], adjust_lr: str) -> float:
    """Return what an orthogonal update of a [rows, columns] matrix is multiplied by."""
    rows, columns = shape
    if adjust_lr == "rms_norm":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if adjust_lr == "spectral_norm" else 1.0
