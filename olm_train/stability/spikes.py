"""Leave out steps that are spikes: decided on the device, without the host knowing.

    loss, gradient norm of the step --push--> rings of the last n of both
    last n (without the step's own) --mean + sigma_factor * deviation--> step factor 1 or 0

A step is left out if its loss or its gradient norm is above the mean of the last ones by more than
`sigma_factor` standard deviations, or is no number. A spike that is left out still enters the
history, so that a lasting change of level is not left out for ever; what is no number does not.
The history is a part of a checkpoint: a resumed run decides as an undisturbed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from olm_data.config.convert import Config
from olm_data.config.hints import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class SkipStepOptions(Config):
    """When a step is left out.

    Attributes:
        rolling_interval_length: steps that mean and deviation are taken over; no step is left out
            before the one that completes the first half of them, nor before the third.
        sigma_factor: deviations above the mean from which a step is left out.
    """

    rolling_interval_length: Annotated[int, Meta(ge=4)] = 128
    sigma_factor: PositiveFloat = 6.0


class StepGuard:
    """The rule of `SkipStepOptions` on a device.

    Args:
        options: interval and factor.
        device: where loss and norm are.
    """

    def __init__(self, options: SkipStepOptions, device: torch.device) -> None:
        self.options = options
        length = options.rolling_interval_length
        self._rings = torch.zeros(2, length, device=device)  # losses, gradient norms
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._factor = torch.ones((), device=device)

    def push(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Decide about a step; to be called before it.

        Args:
            loss, grad_norm: fp32 scalars of the global batch.

        Returns:
            fp32 scalar: 1 if the step is to be taken, 0 if it is to be left out.
        """
        length = self.options.rolling_interval_length
        latest = torch.stack((loss, grad_norm)).to(self._rings.dtype)
        seen = torch.arange(length, device=latest.device) < self._count  # [n], all once it is full
        number = self._count.clamp(1, length)
        mean = self._rings.where(seen, 0).sum(1) / number
        variance = (self._rings - mean[:, None]).where(seen, 0).square().sum(1)
        deviation = (variance / (number - 1).clamp(min=1)).sqrt()
        usual = (latest - mean <= self.options.sigma_factor * deviation).all()
        finite = latest.isfinite().all()
        self._factor.copy_(finite & (usual | (self._count < max(2, length // 2 - 1))))
        place = torch.arange(length, device=latest.device) == self._count % length
        self._rings.copy_(torch.where(place & finite, latest[:, None], self._rings))
        self._count += finite
        return self._factor

    def block(self, blocked: Tensor) -> Tensor:
        """Leave the step out also if `blocked`, an fp32 scalar, is 1; return `skipped`."""
        self._factor.mul_(1 - blocked.to(self._factor.device))
        return self.skipped()

    def skipped(self) -> Tensor:
        """Return fp32 scalar: 1 if the last step that was asked about is left out, else 0."""
        return 1 - self._factor

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint keeps."""
        return {"skip_step.history": self._rings, "skip_step.count": self._count}
