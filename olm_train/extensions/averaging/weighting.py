"""Averages of the weights of many steps: which share each step has, and a running mean.

    shares("decay", 4), shares_of_factors([0.9, 0.4]) -> what each of the weights counts
    RunningMean.update(weights, fraction)             -> mean += (weights - mean) * fraction

A merge of n checkpoints of a constant rate can stand for a decay of the rate: if update i between
them was to count f_i <= 1 of itself, checkpoint i counts f_i - f_(i+1), with f_0 = 1 and f_n = 0
(WSM, Tian et al. 2025). Pure: tensors and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from olm_data.errors import UsageError
from olm_train.model.shards import like as cut_like
from olm_train.model.shards import local_part

Weighting = Literal["uniform", "linear", "decay"]
"""`uniform`: all count the same; `linear`: 1, 2, 3, ...; `decay`: as if the rate had fallen like
1 - sqrt(i / n)."""

_AT_ONCE = 1 << 26
"""Elements for which there are temporary copies at a time."""


def fraction(weighting: Weighting, number: int) -> float:
    """Return what the `number`-th of the weights, from 1, has of the mean of the first `number`.

    For none of the weightings it depends on how many more will come.
    """
    if weighting == "uniform":
        return 1 / number
    if weighting == "linear":
        return 2 / (number + 1)
    return 1 - math.sqrt((number - 1) / number)


def shares(weighting: Weighting, count: int) -> list[float]:
    """Return what each of `count` weights, in the order of their steps, has of the mean."""
    if weighting == "uniform":
        return [1 / count] * count
    if weighting == "linear":
        return [2 * number / (count * (count + 1)) for number in range(1, count + 1)]
    return shares_of_factors([1 - math.sqrt(number / count) for number in range(1, count)])


def shares_of_factors(factors: Sequence[float]) -> list[float]:
    """Return the shares of n checkpoints which stand for a decay, from the n - 1 updates between.

    Args:
        factors: of each update, what the decayed rate has of the constant one; from 1 down to 0.

    Raises:
        UsageError: a factor is larger than the one before, above 1 or below 0.
    """
    whole = [1.0, *factors, 0.0]
    if not all(before >= after for before, after in pairwise(whole)):
        raise UsageError(
            f"the factors {', '.join(f'{factor:g}' for factor in factors)} are no decay",
            why="a checkpoint would count less than nothing",
            fix="give factors from 1 down to 0, none above the one before",
        )
    return [before - after for before, after in pairwise(whole)]


def is_averaged(value: object) -> bool:
    """Whether an entry of a model's state has a mean: a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


class RunningMean:
    """A weighted mean of tensors that come one after another, summed in fp64 and rounded once.

    Between updates an fp32 mean and the fp32 rest of its rounding hold the sum: an update loses at
    most 2^-48 of it, on any CPU, so `mean` is the fp32 number that is nearest to the exact mean but
    where the two around it are as near to within that. Each rank works on its own shards; no
    communication.

    Args:
        like: names and tensors, whole or DTensors; those without floating-point numbers are left
            out.

    Attributes:
        mean, carry: fp32, by name, shaped and sharded like the tensors given. `mean` is the result.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        like = {name: tensor for name, tensor in like.items() if is_averaged(tensor)}
        self.mean, self.carry = (
            {
                name: cut_like(torch.zeros_like(tensor, dtype=torch.float32), tensor)
                for name, tensor in like.items()
            }
            for _ in range(2)
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, for a checkpoint: the live tensors."""
        parts = (("mean", self.mean), ("carry", self.carry))
        return {f"{part}.{name}": t for part, tensors in parts for name, t in tensors.items()}

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor], part: float) -> None:
        """Take weights in: mean + carry += (values - mean - carry) * part, in fp64.

        Args:
            values: by the names that `like` had.
            part: of the new mean that they are; 1: they are the first ones.
        """
        for names in self._groups():
            mean = [local_part(self.mean[name]) for name in names]
            carry = [local_part(self.carry[name]) for name in names]
            total = [one.double().add_(other) for one, other in zip(mean, carry, strict=True)]
            torch._foreach_lerp_(total, [local_part(values[name]).double() for name in names], part)
            torch._foreach_copy_(mean, total)
            torch._foreach_sub_(total, [one.double() for one in mean])
            torch._foreach_copy_(carry, total)

    def _groups(self) -> Iterator[list[str]]:
        group, elements = [], 0
        for name, tensor in self.mean.items():
            group.append(name)
            elements += local_part(tensor).numel()
            if elements >= _AT_ONCE:
                yield group
                group, elements = [], 0
        if group:
            yield group
