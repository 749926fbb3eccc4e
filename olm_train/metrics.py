"""Metrics: recorded by step, kept on the device, read in one transfer when somebody needs them.

    train step -> record(step, {name: tensor | number}) -> collect() -> [(step, {name: float})]

A read of a device tensor waits for the device, so it happens every `metrics_collect_interval`
steps and not in each one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class MetricsBuffer:
    """Values by step and name that have not been read yet."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, torch.Tensor | float]] = {}

    def record(self, step: int, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Keep the metrics of `step`: numbers, or tensors of one element on any device."""
        kept = self._steps.setdefault(step, {})
        for name, value in metrics.items():
            kept[name] = value.detach() if isinstance(value, torch.Tensor) else float(value)

    def collect(self) -> list[tuple[int, dict[str, float]]]:
        """Return and forget everything recorded, steps ascending.

        Tensors become exact: float32 values are widened to float64 on the device and copied
        together, one transfer a device.
        """
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
        collected = [
            (step, {name: float(value) for name, value in metrics.items()})
            for step, metrics in sorted(self._steps.items())
        ]
        self._steps = {}
        return collected
