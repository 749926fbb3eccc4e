"""What a loss of one's own may use besides its arguments: the model, and a place for its terms.

loss(..., context) --context.log("aux", value)--> LossTerms --summed--> {"train/aux": scalar}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.metrics import metric_value
from olm_train.optim.clip import as_scalar


@dataclass(frozen=True)
class LossContext:
    """Given to a loss that has an argument `context`.

    Attributes:
        model: the one that is trained. Under fsdp a parameter of an inner block is a shard there;
            what `forward` left on the model is whole.
        log: takes the name of a term and its value of the micro-batch, a number or a tensor of one
            element. It is weighted, and summed over micro-batches and ranks, as what the loss
            returns is, and logged as "train/NAME" with the metrics of the step. In an evaluation
            nothing is logged.
    """

    model: nn.Module
    log: Callable[[str, Tensor | float], None]


class LossTerms:
    """What a loss has logged in one step.

    Args:
        model, world: of the train module.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world
        self._sums: dict[str, Tensor] = {}
        self._asked = False  # the same on each rank, whatever its loss logs

    def given(self, loss: Callable[..., object], share: Tensor | None) -> dict[str, LossContext]:
        """Return the context of one micro-batch by its name, if the loss has that argument.

        Args:
            loss: a function or a module.
            share: what its terms are multiplied by; None: they are not logged.
        """
        if not _takes_context(loss):
            return {}
        self._asked = True

        def log(name: str, value: Tensor | float) -> None:
            found = torch.as_tensor(metric_value(name, value, "context.log"))
            if share is not None:
                whole = as_scalar(found.detach()).to(self._world.device, torch.float32).reshape(())
                self._sums[name] = self._sums.get(name, 0.0) + whole * share

        return {"context": LossContext(self._model, log)}

    def summed(self, metrics: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
        """Return the metrics of a step with the terms, fp32 scalars; every rank calls it.

        Those of a loss that was given no context come back as they are.

        Raises:
            UsageError: a term has the name of a metric that is there.
        """
        if not self._asked:
            return metrics
        names = sorted({name for each in self._world.gather([*self._sums]) for name in each})
        if taken := [name for name in names if f"train/{name}" in metrics]:
            raise UsageError(
                f"the step has a metric 'train/{taken[0]}' of its own",
                where="context.log",
                fix="log the term under another name",
            )
        if not names:
            return metrics
        none = torch.zeros((), device=self._world.device)
        total = self._world.sum(torch.stack([self._sums.get(name, none) for name in names]))
        return metrics | {f"train/{n}": value for n, value in zip(names, total, strict=True)}


def _takes_context(loss: Callable[..., object]) -> bool:
    call = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        return "context" in inspect.signature(call).parameters
    except (TypeError, ValueError):  # written in C
        return False
