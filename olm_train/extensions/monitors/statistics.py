"""Statistics of many tensors, whole or sharded: local passes, then one packed exchange.

    tensors --local shards--> a row of additive numbers each --'
    activations, per layer --> likewise                      --+--one all-reduce--> Statistics

A row is (elements, sum, squared distances from the local mean, elements * mean^2, zeros,
underflows), float64: rows of shards add up, and the variance of the whole follows from the sums
exactly (Chan, Golub and LeVeque, 1979), without a second pass around the common mean. Maxima do not
add up, so each rank writes its own into a column of its own, and zeros elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from olm_train.distributed.world import World
from olm_train.model.shards import is_first_holder, local_part

SMALLEST_NORMAL = torch.finfo(torch.bfloat16).tiny
"""What is smaller loses bits in bfloat16, and is 0 to kernels that flush subnormal numbers."""
SMALL = 1 << 16
"""Elements up to which a tensor is copied to float64 to be measured."""
COLUMNS = 6


class Rows(NamedTuple):
    """What this rank knows of some tensors.

    Attributes:
        sums: float64 [n, COLUMNS], see above; 0 where another rank counts the same elements.
        largest: float64 [n], largest absolute value; 0 likewise.
    """

    sums: Tensor
    largest: Tensor


class Statistics(NamedTuple):
    """Of n tensors, each float64 [n]; NaN where a tensor has none of it.

    Attributes:
        max: largest absolute value.
        mean, var, rms: mean, variance (n - 1 in the denominator), root of the mean square.
        zeros, underflow: shares of all elements.
    """

    max: Tensor
    mean: Tensor
    var: Tensor
    rms: Tensor
    zeros: Tensor
    underflow: Tensor


@torch.no_grad()
def measure(
    tensors: Sequence[Tensor],
    world: World,
    *,
    local: Sequence[Tensor] | None = None,
    underflows: Sequence[Tensor] | None = None,
) -> Rows:
    """Return the rows of whole or sharded tensors, on the device of the world.

    Args:
        tensors: of floating-point numbers; DTensors are measured where they lie.
        local: look at these, cut as this rank's parts of `tensors`, and not at those.
        underflows: of each local part the number of elements that count as such; None: nobody asks.
    """
    parts = [local_part(tensor) for tensor in tensors] if local is None else list(local)
    sums = torch.zeros(len(parts), COLUMNS, dtype=torch.float64, device=world.device)
    largest = torch.zeros(len(parts), dtype=torch.float64, device=world.device)
    here = [
        i
        for i, part in enumerate(parts)
        if part.numel() and is_first_holder(tensors[i], main=world.main)
    ]
    if not here:
        return Rows(sums, largest)
    rows = torch.stack(
        [_row(parts[i], None if underflows is None else underflows[i]) for i in here]
    )
    maxima = torch._foreach_norm([parts[i] for i in here], torch.inf)
    maximum = torch.stack([each.to(torch.float64) for each in maxima])
    index = torch.tensor(here).to(world.device, non_blocking=True)
    sums[index] = rows.to(world.device, non_blocking=True)
    largest[index] = maximum.to(world.device, non_blocking=True)
    return Rows(sums, largest)


@torch.no_grad()
def underflows_of(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return of each part the number of elements that are not 0 but below SMALLEST_NORMAL."""
    return [((part != 0) & (part.abs() < SMALLEST_NORMAL)).sum() for part in parts]


@torch.no_grad()
def lost_updates(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    """Return of each part the number of elements that changed, but not their bfloat16 rounding."""
    kind = torch.bfloat16
    return [
        ((a != b) & (a.to(kind) == b.to(kind))).sum() for a, b in zip(before, after, strict=True)
    ]


def finish(rows: Rows, world: World, *, averaged: int = 0) -> Statistics:
    """Return the statistics of the whole tensors, the same on each rank.

    Args:
        rows: of this rank. Every rank calls it; one all-reduce.
        averaged: so many of the last rows are activations: their means and variances are averages
            over the rows of a batch, and they have no other statistics but the maximum.
    """
    sums, largest = rows
    if world.size > 1:
        columns = torch.zeros(len(largest), world.size, dtype=torch.float64, device=sums.device)
        columns[:, world.rank] = largest
        packed = world.sum(torch.cat([sums, columns], 1))
        sums, largest = packed[:, :COLUMNS], packed[:, COLUMNS:].amax(1)
    count, total, inside, of_means, zeros, underflow = sums.unbind(1)
    mean = total / count
    between = (of_means - total * mean).clamp(min=0)
    var = torch.where(count > 1, (inside + between) / (count - 1), torch.nan)
    if averaged:
        var[-averaged:] = inside[-averaged:] / count[-averaged:]
    rms = ((inside + of_means) / count).sqrt()
    return Statistics(largest, mean, var, rms, zeros / count, underflow / count)


def _row(part: Tensor, lost: Tensor | None) -> Tensor:
    count = part.numel()
    if count <= SMALL:
        part = part.to(torch.float64)
    elif part.dtype != torch.float64:
        part = part.to(torch.float32)
    mean = part.sum(dtype=torch.float64) / count
    inside = part.var(correction=0).to(torch.float64) * count
    zeros = count - torch.count_nonzero(part)
    under = torch.zeros_like(mean) if lost is None else lost
    numbers = (
        torch.full_like(mean, count),
        mean * count,
        inside,
        mean * mean * count,
        zeros,
        under,
    )
    return torch.stack([number.to(torch.float64) for number in numbers])
