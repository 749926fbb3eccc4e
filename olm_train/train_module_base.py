"""What the trainer asks of the thing it trains; `train_module.TransformerTrainModule` is ours.

    Trainer --batches, step--> train_step --metrics--> Trainer
            --batch----------> eval_losses | eval_batch --> evaluator
            <--state_dict, load_state_dict--> checkpoint

A module of one's own derives from `TrainModule`, sets `world`, `model` and `optimizer`, and writes
the four methods that have no default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from olm_data.errors import UsageError
from olm_train.data.base import DataLoaderBase
from olm_train.distributed.world import World
from olm_train.duration import Duration
from olm_train.stability.gate import NonFinite


def _nobody() -> None:
    """What looks at gradients where nobody does."""


class TrainModule(ABC):
    """Model, optimiser and step.

    Attributes:
        world: the processes that train together.
        model: its parameters are waited for and counted. Its `config`, a dataclass or mapping where
            it has one, is saved with each checkpoint; a resume with another one is refused.
        optimizer: its class is recorded, and a resume with another one refused; its step is what
            the hook `pre_optim_step` runs before.
        config: options of the step, a dataclass or mapping, saved with each checkpoint; a resume
            says what has changed. None: there are none.
        watch_losses: called by `train_step` with each micro-batch and the losses of its labels,
            fp32 [b * S] in nats, detached, 0 where a label is ignored. None: nobody asks. A module
            whose loss does not give them calls nobody.
        gradients_ready: to be called by `train_step` once the gradients of the global batch are
            there, before they are clipped; callbacks look at them then.
    """

    world: World
    model: nn.Module
    optimizer: Optimizer
    config: Any = None
    watch_losses: Callable[[Any, Tensor], None] | None = None
    gradients_ready: Callable[[], None] = staticmethod(_nobody)

    @abstractmethod
    def train_step(
        self,
        batches: Sequence[Any],
        step: int,
        max_steps: int,
        *,
        tokens: tuple[int, int] | None = None,
        batch_growth: float = 1.0,
    ) -> Mapping[str, Tensor | float]:
        """Take one optimiser step on this rank's micro-batches of a global batch.

        Args:
            batches: the same number on each rank, at least one.
            step: the step to take, 1..max_steps.
            max_steps: length of the run.
            tokens: trained on after this step, and in the whole run.
            batch_growth: size of this global batch over that of the run's first.

        Returns:
            Metrics, the same on each rank, numbers or scalars on the device. "train/CE loss",
            "optim/total grad norm" and "optim/lr" are printed; others are logged.
            "optim/non-finite" is 1 where a step was not taken, see `non_finite`.
        """

    @abstractmethod
    def eval_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of a batch, in nats, and the number of its labels."""

    def eval_losses(self, batch: Any, *, fp32_logits: bool = False) -> Tensor | None:
        """Return the loss of each label of a batch, fp32 [b, S] in nats, 0 where it is ignored.

        `fp32_logits` asks for logits in fp32, where the weights are of another dtype. Default:
        None, they are not known; then an evaluation asks `eval_batch`.
        """
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, nested by names: tensors, which may be sharded, and
        plain values. The tensors are the live ones. Weights lie under "model"."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state as `state_dict` returns it, or its "model" alone.

        A checkpoint is read into what `state_dict` returned before, tensors in place; then this is
        called with it. State that the optimiser creates at its first step is made before.
        """

    def ensure_weights(self) -> None:  # noqa: B027  # a default, and a good one
        """Give the weights their initial values, where a run begins without; default: nothing."""

    def check_length(self, steps: int, tokens: int) -> None:  # noqa: B027  # likewise
        """Refuse a run of a length that the schedule does not fit; default: nothing."""

    def require_weighing(self) -> None:
        """Refuse a lock with loss weights, `Batch.weights`; default: always.

        Raises:
            UsageError: losses of labels are not weighed.
        """
        raise UsageError(
            f"{type(self).__name__} does not weigh labels, and the lock has loss weights",
            why="it was not written for Batch.weights",
            fix="write require_weighing once it is, or leave loss_weight out of the manifest",
        )

    def describe(self) -> list[str]:
        """Return lines to print before the first step; default: none."""
        return []

    def flops_per_token(self, pairs_per_token: float) -> float | None:
        """Return the FLOPs of a training step for a token that sees so many keys; None: unknown."""
        return None

    @property
    def non_finite(self) -> NonFinite:
        """What the trainer does where "optim/non-finite" is 1; default: it ends the run."""
        return NonFinite.halt

    @property
    def num_params(self) -> int:
        """Parameters of the model, for durations in tokens a parameter."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def model_config(self) -> Any:
        """Shape of the model: its `config` if that is a dataclass or a mapping, else empty."""
        config = getattr(self.model, "config", None)
        known = isinstance(config, Mapping) or is_dataclass(config)
        return config if known else {}


def require_parts(train_module: object, data_loader: object, *durations: object) -> None:
    """Refuse what a `Trainer` cannot take for a part, such as a plain model or loader of torch.

    Args:
        durations: each a `Duration` or None.

    Raises:
        UsageError: one is no such part; says what to write.
    """
    for name, part, kind, fix in (
        ("train_module", train_module, TrainModule, "BasicTrainModule(model, optimizer, loss)"),
        ("data_loader", data_loader, DataLoaderBase, "TorchDataLoader(loader)"),
    ):
        if not isinstance(part, kind):
            raise UsageError(
                f"{name} is a {kind.__name__}, not a {type(part).__name__}",
                where="Trainer",
                fix=f"give {name}={fix}, or derive a class of your own from {kind.__name__}",
            )
    for each in durations:
        if not isinstance(each, Duration | None):
            raise UsageError(
                f"max_duration and hard_stop are Durations, not {each!r}",
                where="Trainer",
                fix="give Duration.steps(100), Duration.tokens(...) or Duration.epochs(...)",
            )
