"""Metrics: recorded by step, kept on the device, read in one transfer when somebody needs them.

    train step -> record(step, {name: tensor | number}) -> collect() -> [(step, {name: float})]
    callback   -> record_one(step, name, value, reduce) --'  (reduced over the ranks that have it)

A read of a device tensor waits for the device, so it happens every `metrics_collect_interval`
steps and not in each one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import torch
from torch.distributed.tensor import DTensor

from olm_data.errors import UsageError, suggest
from olm_train.distributed.world import World


class Reduce(StrEnum):
    """How the values that ranks recorded of one metric become one."""

    mean = "mean"
    sum = "sum"
    max = "max"
    min = "min"

    def of(self, values: Sequence[float]) -> float:
        """Return the value for those of the ranks that recorded one; NaN where one is NaN."""
        if any(map(math.isnan, values)):
            return math.nan
        match self:
            case Reduce.mean:
                return math.fsum(values) / len(values)
            case Reduce.sum:
                return math.fsum(values)
            case Reduce.max:
                return max(values)
            case Reduce.min:
                return min(values)


class MetricsBuffer:
    """Values by step and name that have not been read yet.

    Args:
        world: the ranks that values with a reduction are reduced over.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = world or World()
        self._steps: dict[int, dict[str, torch.Tensor | float]] = {}
        self._reduce: dict[tuple[int, str], Reduce] = {}

    def record(self, step: int, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Keep the metrics of `step`: numbers, or tensors of one element on any device."""
        kept = self._steps.setdefault(step, {})
        for name, value in metrics.items():
            kept[name] = _detached(value) if isinstance(value, torch.Tensor) else float(value)

    def record_one(
        self, step: int, name: str, value: torch.Tensor | float, reduce: Reduce | None
    ) -> None:
        """Keep one metric of `step`; with a reduction it may differ between ranks, or be on some.

        Without one, ranks hold the same value, or only that of rank 0 counts.

        Raises:
            UsageError: a name, value or reduction that is none.
        """
        number = metric_value(name, value, "record_metric")
        if reduce is not None and reduce not in list(Reduce):
            raise UsageError(
                f"{reduce!r} is no way to reduce the metric {name!r}",
                where="record_metric",
                fix=suggest(str(reduce), [each.value for each in Reduce]),
            )
        self.record(step, {name: number})
        if reduce is not None:
            self._reduce[step, name] = Reduce(reduce)

    def names(self) -> list[str]:
        """Return the names of what has not been collected."""
        return sorted({name for metrics in self._steps.values() for name in metrics})

    def collect(self, last: int) -> list[tuple[int, dict[str, float]]]:
        """Return and forget what was recorded up to step `last`, ascending; every rank calls it.

        Tensors become exact: float32 values are widened to float64 on the device and copied
        together, one transfer a device.
        """
        later = {step: metrics for step, metrics in self._steps.items() if step > last}
        self._steps = {step: m for step, m in self._steps.items() if step <= last}
        self._make_whole()
        places = [
            (step, name, value)
            for step, metrics in self._steps.items()
            for name, value in metrics.items()
            if isinstance(value, torch.Tensor)
        ]
        if places:
            stacked = torch.stack([value.reshape(()).to(torch.float64) for *_, value in places])
            for (step, name, _), number in zip(places, stacked.tolist(), strict=True):
                self._steps[step][name] = number
        for (step, name), value in self._reduced().items():
            self._steps.setdefault(step, {})[name] = value
        collected = [
            (step, {name: float(value) for name, value in metrics.items()})
            for step, metrics in sorted(self._steps.items())
        ]
        self._steps = later
        self._reduce = {key: each for key, each in self._reduce.items() if key[0] in later}
        return collected

    def _make_whole(self) -> None:
        """Give DTensors, such as the norm of a sharded gradient, their one value.

        Raises:
            UsageError: one was not recorded on each rank, all of which it takes.
        """
        sharded = {
            (step, name): value
            for step, metrics in self._steps.items()
            for name, value in metrics.items()
            if isinstance(value, DTensor)
        }
        if not self._world.any(bool(sharded)):
            return
        by_rank = [set(keys) for keys in self._world.gather([*sharded])]
        if some := sorted(set.union(*by_rank) - set.intersection(*by_rank)):
            raise UsageError(
                f"the metric {some[0][1]!r} of step {some[0][0]:,} is sharded, and was not "
                "recorded on every rank",
                where="record_metric",
                why="its value is that of all shards together",
                fix="record it on every rank, or what .to_local() gives with a reduction",
            )
        for step, name in sorted(sharded):
            self._steps[step][name] = sharded[step, name].full_tensor()

    def _reduced(self) -> dict[tuple[int, str], float]:
        """Return the metrics with a reduction, over all ranks; one exchange where there are any."""
        own = {
            (step, name): (reduce, float(self._steps[step][name]))
            for (step, name), reduce in self._reduce.items()
            if step in self._steps
        }
        if not self._world.any(bool(own)):
            return {}
        values: dict[tuple[int, str], list[float]] = {}
        kinds: dict[tuple[int, str], Reduce] = {}
        for theirs in self._world.gather(own):
            for key, (reduce, value) in theirs.items():
                kinds.setdefault(key, reduce)
                values.setdefault(key, []).append(value)
        return {key: kinds[key].of(each) for key, each in values.items()}


def metric_value(name: str, value: torch.Tensor | float, where: str) -> torch.Tensor | float:
    """Return a number, or a tensor of one element, that is given as a metric.

    Args:
        where: what it was given to.

    Raises:
        UsageError: it is neither, or the name is none.
    """
    number = value if isinstance(value, torch.Tensor) else _number(value)
    if not (isinstance(name, str) and name.isprintable() and name.strip()):
        raise UsageError(
            f"{name!r} is no name of a metric", where=where, fix="give it one line of text"
        )
    if number is None or (
        isinstance(number, torch.Tensor) and (number.numel() != 1 or number.is_complex())
    ):
        raise UsageError(
            f"the metric {name!r} is {_words(value)}",
            where=where,
            fix="give a number, or a tensor of one element",
        )
    return number


def _detached(value: torch.Tensor) -> torch.Tensor:
    """Return a value without its graph; its ranks need not do so together.

    From torch 2.15 on, `detach` of a norm that is not yet reduced reduces it.
    """
    if not isinstance(value, DTensor):
        return value.detach()
    return DTensor.from_local(
        value.to_local().detach(),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _number(value: object) -> float | None:
    """Return a number that is given in Python or NumPy; None: it is none."""
    try:
        return None if isinstance(value, (str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _words(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of {value.numel():,} elements"
    return f"a {type(value).__name__}" + (
        f", {value!r}" if isinstance(value, str) and len(value) < 40 else ""
    )
