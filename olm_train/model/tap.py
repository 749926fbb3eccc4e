"""Where a model shows its activations: `x = tap("name", x)`, which by itself does nothing.

    block(x, rope, context)                      tap = Tap(): x passes
    block.watched(slots, x, rope, context)       tap = Watcher: x passes, a row of numbers is kept
      forward: row of x -> an output             backward: row of its gradient -> gradient of slots

No hook and no side effect, so a watched block compiles as one graph, is checkpointed and sharded as
any other. The gradient of `slots`, which nothing depends on, carries what the backward pass saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

ROW = 4
"""Of an activation [b, ...]: rows b, sum of their means, sum of their variances, largest absolute
value. fp32."""


class Tap:
    """Shows nothing."""

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Pass an activation on: the output of the submodule `name`, "" of the module itself."""
        return x

    def within(self, name: str) -> Tap:
        """Return the tap of a submodule."""
        return self


NO_TAP = Tap()


class Watcher(Tap):
    """Keeps a row of each activation that passes.

    Args:
        names: of what may be kept; others pass.
        slots: fp32 [len(names), ROW] zeros; if they require a gradient, it will be the rows of the
            activations' gradients.
    """

    def __init__(self, names: Sequence[str], slots: Tensor) -> None:
        self.names, self.slots = names, slots
        self.rows = [torch.zeros_like(slots[0]) for _ in names]
        self._prefix = ""

    def __call__(self, name: str, x: Tensor) -> Tensor:
        name = (self._prefix + name).removesuffix(".")
        if name not in self.names:
            return x
        place = self.names.index(name)
        self.rows[place] = row_of(x.detach())
        if self.slots.requires_grad and x.requires_grad:
            return _Watched.apply(x, self.slots[place])  # type: ignore[no-untyped-call]
        return x

    def within(self, name: str) -> Tap:
        inner = Watcher.__new__(Watcher)
        inner.names, inner.slots, inner.rows = self.names, self.slots, self.rows
        inner._prefix = f"{self._prefix}{name}."
        return inner


def row_of(x: Tensor) -> Tensor:
    """Return the ROW numbers of an activation or its gradient [b, ...], on its device."""
    var, mean = torch.var_mean(x.flatten(1).to(torch.float32), dim=1)  # [b] each
    count = torch.full_like(mean[0], x.shape[0])
    return torch.stack([count, mean.sum(), var.sum(), x.abs().amax().to(torch.float32)])


def names_within(module: nn.Module) -> tuple[str, ...]:
    """Return the names that activations of a module may have: its own, "", and its submodules'."""
    found = module.named_modules()
    return tuple(name for name, each in found if not isinstance(each, nn.Identity))


class _Watched(torch.autograd.Function):
    """The identity; its second argument gets the row of the gradient for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, row_of(gradient)
