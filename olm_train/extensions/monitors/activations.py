"""Rows of the activations of one step and of their gradients, over its micro-batches.

    begin: blocks run `watched` instead of `forward`, and keep rows and slots
    end: forward again -> Rows of activations, Rows of activation gradients

Used on the steps that are looked at only; on the others a model runs as if this were not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from olm_train.extensions.monitors.statistics import COLUMNS, Rows
from olm_train.model.decoder import Decoder
from olm_train.model.tap import NO_TAP, ROW, Tap, Watcher, names_within


class ActivationProbe:
    """Looks at the activations of a decoder.

    Args:
        model: whole or sharded, compiled or not.
        gradients: look at their gradients too.

    Attributes:
        names: of what it may see, `blocks.0.attention.w_out`; each has a row, which stays zero for
            what is not seen.
    """

    def __init__(self, model: Decoder, *, gradients: bool) -> None:
        self._model, self._gradients = model, gradients
        self._within = [names_within(block) for block in model.blocks]
        self.names = ["embeddings", "norm"]
        for number, names in enumerate(self._within):
            self.names += [f"blocks.{number}.{name}".rstrip(".") for name in names]
        self._rows: Tensor | None = None
        self._slots: list[tuple[int, Tensor]] = []
        self._forwards: list[Any] = []

    def begin(self, device: torch.device) -> None:
        """Look from here on."""
        assert not self._forwards
        self._rows = torch.zeros(len(self.names), ROW, device=device)
        self._model.tap = _Outside(self)
        first = 2
        for block, names in zip(self._model.blocks, self._within, strict=True):
            self._forwards.append(vars(block).get("forward"))
            vars(block)["forward"] = _Watched(self, block, first, len(names))
            first += len(names)

    def end(self) -> tuple[Tensor, Tensor]:
        """Look no longer.

        Returns:
            Rows fp32 [len(names), ROW] of this rank's activations and of their gradients.
        """
        self._model.tap = NO_TAP
        for block, forward in zip(self._model.blocks, self._forwards, strict=False):
            if forward is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = forward
        assert self._rows is not None
        rows, gradients = self._rows, torch.zeros_like(self._rows)
        for first, slots in self._slots:
            if slots.grad is not None:
                _add(gradients[first : first + len(slots)], slots.grad)
        self._rows, self._slots, self._forwards = None, [], []
        return rows, gradients

    def slots(self, first: int, count: int) -> Tensor:
        """Return new slots for `count` activations, from number `first` on."""
        assert self._rows is not None
        slots = torch.zeros(count, ROW, device=self._rows.device, requires_grad=self._gradients)
        self._slots.append((first, slots))
        return slots

    def keep(self, first: int, rows: Tensor) -> None:
        """Add the rows that a forward pass has seen, from number `first` on."""
        assert self._rows is not None
        _add(self._rows[first : first + len(rows)], rows.detach())


class _Watched:
    """The forward function of a block that is looked at."""

    def __init__(self, probe: ActivationProbe, block: nn.Module, first: int, count: int) -> None:
        self._probe, self._block, self._place = probe, block, (first, count)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        block: Any = self._block
        x, rows = block.watched(self._probe.slots(*self._place), *args, **kwargs)
        self._probe.keep(self._place[0], rows)
        result: Tensor = x
        return result


class _Outside(Tap):
    """Looks at what is outside the blocks."""

    def __init__(self, probe: ActivationProbe) -> None:
        self._probe = probe

    def __call__(self, name: str, x: Tensor) -> Tensor:
        place = self._probe.names.index(name)
        watcher = Watcher((name,), self._probe.slots(place, 1))
        x = watcher(name, x)
        self._probe.keep(place, torch.stack(watcher.rows))
        return x


def as_rows(activations: Sequence[Tensor]) -> Rows:
    """Return ROWs of activations as rows to be finished together with those of tensors.

    Mean and variance are those within a row of a batch, averaged over its rows.
    """
    each = torch.cat(list(activations)).to(torch.float64)
    sums = torch.zeros(len(each), COLUMNS, dtype=torch.float64, device=each.device)
    sums[:, :3] = each[:, :3]
    return Rows(sums, each[:, 3])


def _add(own: Tensor, rows: Tensor) -> None:
    own[:, :3] += rows[:, :3]
    own[:, 3] = torch.maximum(own[:, 3], rows[:, 3])
