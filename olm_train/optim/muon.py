"""Muon (Jordan et al., 2024) for the matrices of the blocks, AdamW for all else.

    gradient -> momentum (sharded as the weight is) -> whole matrix, on one of the ranks
             -> nearest orthogonal matrix -> scaled -> each rank's share of it -> weight

The matrices are divided over the ranks (division.py); what one rank computes all others take, so
weights do not depend on how they are sharded. A parameter that holds several matrices, such as the
rows of queries, keys and values, is orthogonalised part by part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from olm_data.config.hints import NonNegativeFloat, PositiveFloat
from olm_train.distributed.world import World
from olm_train.model.layers import Linear
from olm_train.optim.base import Decay, OptimConfig
from olm_train.optim.division import Division, Grid, Matrix
from olm_train.optim.groups import ParamGroup

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration (Jordan et al., 2024)."""
STEPS = 5


class Muon(Optimizer):
    """Muon on groups with `"parts"`, AdamW on the others.

    Args:
        groups: with "params", "lr", "weight_decay"; with "momentum", "nesterov", "adjust_lr" and
            "parts", a list of the row counts inside each matrix; or with "betas" and "eps".

    Attributes:
        world: the ranks that hold the parameters, over which the work is divided; at first this one
            alone.
        reduced: matrices are exchanged and orthogonalised in bfloat16 on a CPU too, as on CUDA.
    """

    def __init__(self, groups: list[ParamGroup]) -> None:
        super().__init__(groups, {})
        self.world, self.reduced = World(), False
        self._divided: tuple[object, Division] | None = None
        for group in self.param_groups:
            names = ["momentum_buffer"] if "parts" in group else ["exp_avg", "exp_avg_sq"]
            for parameter in group["params"]:
                state = {name: torch.zeros_like(parameter) for name in names}
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
        for group in self.param_groups:
            if "parts" not in group:
                self._adamw(group)
        pieces = [
            _Piece(group, parameter, first, first + rows)
            for group in self.param_groups
            if "parts" in group
            for parameter, parts in zip(group["params"], group["parts"], strict=True)
            if parameter.grad is not None
            for rows, first in zip(parts, accumulate(parts, initial=0), strict=False)
        ]
        if not pieces:
            return
        for piece in pieces:
            if piece.first == 0:  # once a parameter, on every rank that holds some of it
                momentum = self.state[piece.parameter]["momentum_buffer"]
                momentum.lerp_(piece.parameter.grad, 1 - piece.group["momentum"])
        division = self._divide(pieces)
        grid = division.grid

        def update(number: int) -> Tensor:
            piece, where = pieces[number], division.matrices[number].local(grid.shard, grid.shards)
            momentum = _local(self.state[piece.parameter]["momentum_buffer"])[where]
            if not piece.group["nesterov"]:
                return momentum
            return _local(piece.parameter.grad)[where].lerp(momentum, piece.group["momentum"])

        def turn(number: int, whole: Tensor) -> Tensor:
            whole = whole.bfloat16() if self.reduced else whole
            return orthogonalise(whole).mul_(scale(whole.shape, pieces[number].group["adjust_lr"]))

        def use(number: int, rows: Tensor) -> None:
            piece, where = pieces[number], division.matrices[number].local(grid.shard, grid.shards)
            weight = _local(piece.parameter)[where]
            weight.mul_(1 - piece.group["lr"] * piece.group["weight_decay"])
            weight.add_(rows.to(weight.dtype), alpha=-piece.group["lr"])

        division.run(update, turn, use)

    def _divide(self, pieces: list[_Piece]) -> Division:
        """Return who does what; made anew where other parameters have a gradient."""
        key = tuple((id(piece.parameter), piece.first) for piece in pieces)
        if self._divided is None or self._divided[0] != key:
            first = pieces[0].parameter
            matrices = [piece.matrix for piece in pieces]
            reduced = first.is_cuda or self.reduced
            like = _local(first).new_empty(0, dtype=torch.bfloat16 if reduced else None)
            costs = [cost(matrix.stop - matrix.first, matrix.columns) for matrix in matrices]
            grid = Grid.of(first, self.world)
            self._divided = key, Division(matrices, costs, grid, like)
        return self._divided[1]

    def _adamw(self, group: ParamGroup) -> None:
        found = [p for p in group["params"] if p.grad is not None]
        if not found:
            return
        states = [self.state[p] for p in found]
        beta1, beta2 = group["betas"]
        adamw(
            found,
            [p.grad for p in found],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimConfig):
    """Muon for the matrices of the blocks; embeddings, head and vectors by AdamW.

    Attributes:
        lr: peak learning rate of both.
        betas: decay rates of the moments of AdamW, which takes embeddings, head and vectors.
        eps: of AdamW: added to the root of the second moment.
        mu: momentum of Muon.
        nesterov: look ahead by one step of the momentum.
        adjust_lr: `rms_norm` gives updates the size that AdamW's have, so that both take one rate
            (Liu et al., 2025); `spectral_norm` scales by the square root of rows / columns, where
            that is above 1; `none` leaves the orthogonal matrix as it is.
    """

    name: Literal["muon"] = "muon"
    lr: NonNegativeFloat = 1e-3
    eps: PositiveFloat = 1e-8
    mu: Decay = 0.95
    nesterov: bool = True
    adjust_lr: Literal["rms_norm", "spectral_norm", "none"] = "rms_norm"

    group_options = ("betas", "eps", "mu")

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Muon:
        inner = {
            f"{name}.weight": module.parts
            for name, module in model.named_modules()
            if isinstance(module, Linear) and name.startswith("blocks.")
        }
        split: list[ParamGroup] = []
        for group in groups:
            mu = group.pop("mu", self.mu)
            by_muon = {"momentum": mu, "nesterov": self.nesterov, "adjust_lr": self.adjust_lr}
            by_adamw = {"betas": self.betas, "eps": self.eps}
            pairs = list(zip(group["names"], group["params"], strict=True))
            for inside, options in ((True, by_muon), (False, by_adamw)):
                chosen = [(name, p) for name, p in pairs if (name in inner) is inside]
                if not chosen:
                    continue
                names, parameters = zip(*chosen, strict=True)
                made = {**options, **group, "names": list(names), "params": list(parameters)}
                if inside:
                    made["parts"] = [inner[name] for name in names]
                split.append(made)
        return Muon(split)


@dataclass(frozen=True)
class _Piece:
    """Rows of a parameter that are one matrix, and the options of its group."""

    group: ParamGroup
    parameter: Tensor
    first: int
    stop: int

    @property
    def matrix(self) -> Matrix:
        """Where the rows lie."""
        rows, columns = self.parameter.shape
        return Matrix(rows, columns, self.first, self.stop)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
