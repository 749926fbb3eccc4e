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

from enum import StrEnum

import torch
from torch import Tensor
from torch.optim import Optimizer

from olm_train.stability.spikes import StepGuard


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
