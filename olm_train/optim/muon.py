"""Muon (Jordan et al., 2024) for the matrices of the blocks but routers, AdamW for all else.

    gradient -> momentum (sharded as the weight is) -> whole matrix, on one of the ranks
             -> nearest orthogonal matrix -> scaled -> each rank's share of it -> weight

The matrices are divided over the ranks (`division.py`); what one rank computes all others take, so
weights do not depend on how they are sharded. A parameter that holds several matrices, such as the
rows of queries, keys and values, or those of experts, is orthogonalised part by part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from olm_data.config.hints import NonNegativeFloat, PositiveFloat
from olm_train.distributed.world import World
from olm_train.model.layers import LinearLayer
from olm_train.model.mixture import Experts
from olm_train.model.parametrization import GAINS
from olm_train.optim.base import Decay, OptimConfig
from olm_train.optim.division import Division, Grid, Piece, rows_of
from olm_train.optim.groups import ParamGroup
from olm_train.optim.half import (
    DTYPES,
    MomentDtype,
    Rounding,
    adam_kernel,
    numbered,
    step_adam,
)

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

    def _gains(self, model: nn.Module) -> Mapping[str, float]:
        return dict.fromkeys(_inner(model), GAINS[self.adjust_lr])

    def _split(
        self, model: nn.Module, groups: list[ParamGroup], **options: Any
    ) -> list[ParamGroup]:
        """Return groups of matrices, with "parts" and `options`, and groups of all else."""
        inner = _inner(model)
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


def _inner(model: nn.Module) -> dict[str, Any]:
    """Return the row counts inside each matrix of the blocks but routers, by name."""
    return {
        f"{name}.weight": module.parts
        for name, module in model.named_modules()
        if isinstance(module, LinearLayer) and name.startswith("blocks.")
    } | {
        f"{name}.{leaf}": parts
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for leaf, parts in module.parts.items()
    }


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
