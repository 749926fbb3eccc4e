"""A non-finite loss or gradient: the step is not taken, on any rank, and the host need not
know at once.

    loss, gradient norm --device--> bad? --> blocked: 1 = weights and moments stay as they are
                                      |               (`skip`: this step; else: all steps from here)
                                      '----> "optim/non-finite", read with the other metrics

Loss and norm have the same bits on every rank, so every rank blocks the same steps. `halt` and
`rewind` block everything after the first bad step too, so that the host finds the weights of the
step before when it learns of it, at the next read of the metrics (report.py). So the check costs no
wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor
from torch.optim import Optimizer

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


class NonFinite(StrEnum):
    """What a run does about a step whose loss or gradient norm is NaN or infinite."""

    halt = "halt"
    """End with an error that names the step's documents."""
    skip = "skip"
    """Leave the weights as they are and go on with the next step."""
    rewind = "rewind"
    """Go back to the newest good checkpoint and leave out the rows of the step."""


class FiniteGate:
    """Decides on the device which steps are taken.

    Args:
        policy: `skip` blocks single steps, the others everything from the first bad one on.
        device: where loss and norm are.
    """

    def __init__(self, policy: NonFinite, device: torch.device) -> None:
        self.policy = policy
        self._blocked = torch.zeros((), device=device)

    def judge(self, loss: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Decide about a step before it is taken.

        Args:
            loss, grad_norm: fp32 scalars of the global batch.

        Returns:
            fp32 scalars: 1 if this step is bad, else 0; and 1 if it must not be taken, else 0.
        """
        bad = (~torch.isfinite(loss + grad_norm)).to(torch.float32)
        if self.policy is NonFinite.skip:
            return bad, bad
        self._blocked = torch.maximum(self._blocked, bad)
        return bad, self._blocked

    def open(self) -> None:
        """Take steps again: the state has been replaced by a good one."""
        self._blocked = torch.zeros_like(self._blocked)


def take_step(optimizer: Optimizer, blocked: Tensor) -> None:
    """Take a step unless `blocked`, a scalar on the device, is 1: then nothing changes at all.

    Fused Adam and AdamW, and optimisers that skip spikes, look at the flag on the device. For the
    others the host has to: one wait for the device a step.
    """
    guard: StepGuard | None = getattr(optimizer, "guard", None)
    if guard is not None:
        blocked = guard.block(blocked)
    if optimizer.defaults.get("fused"):
        # The kernel takes no step, and counts none, where this flag is 1.
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        place = next(parameters).device  # the host with cpu_offload
        optimizer.found_inf = blocked.to(place)  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    elif guard is None and blocked:
        return
    optimizer.step()
