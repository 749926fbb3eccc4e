"""Loss, perplexity and bits per byte on held-out data sets, exact over ranks and micro-batches.

The sum of the losses and the count of the labels are added over all batches and ranks, then divided
once: the result does not depend on how the rows were spread. What measures is
`olm_train.evaluation.held_out`, here and in `olm-train evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from msgspec import Meta

from olm_data.config.hints import FilePath, PositiveInt
from olm_data.errors import OlmError
from olm_data.mixture.lock import Lock
from olm_data.mixture.shared import warnings_of_held_out
from olm_train.callbacks.evaluations import Evaluations
from olm_train.data.base import require_lock
from olm_train.evaluation.held_out import HeldOut, open_held_out

NEEDS = "the callback lm_evaluator"


@dataclass(kw_only=True)
class LMEvaluatorCallback(Evaluations):
    """Loss, perplexity and bits per byte on held-out data sets.

    Attributes:
        enabled: evaluate, where `lm_evaluator` is given at all.
        eval_interval: steps between evaluations.
        fixed_steps: further steps after which to look at them.
        eval_on_startup: also before the first step.
        eval_on_finish: also after the last step.
        cancel_after_first_eval: end the run after the first evaluation, see `trainer.on_cancel`.
        datasets: held-out datasets of the mixture's tokenizer: folder of each by the name it gets
            in the logs.
        by: what results are also given for: names of kept columns of the documents, `input`,
            `document_length`, `position` (of a token in its document) or `context` (tokens that the
            model saw before it).
        max_batches: at most this many micro-batches of each data set on each rank; null: all of it.
    """

    called: ClassVar[str] = "lm_evaluator"

    datasets: Annotated[dict[str, FilePath], Meta(min_length=1)]
    by: list[str] = field(default_factory=list)
    max_batches: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sets: dict[str, HeldOut] = {}

    def folders(self) -> dict[str, str]:
        return dict(self.datasets)

    def digest(self, name: str, folder: str) -> str:
        if name in self._sets:
            return self._sets[name].dataset.digest
        return open_held_out(name, folder, require_lock(self.trainer.data_loader, NEEDS)).digest

    def pre_train(self) -> None:
        trainer, lock = self.trainer, require_lock(self.trainer.data_loader, NEEDS)
        size = getattr(trainer.data_loader, "rank_microbatch_size", lock.sequence_length)
        for name, folder in self.datasets.items():
            dataset = open_held_out(name, folder, lock)
            self._sets[name] = HeldOut(
                dataset, lock.sequence_length, size, by=self.by, world=trainer.world
            )
        if trainer.world.main:
            self._warn(lock)

    def _warn(self, lock: Lock) -> None:
        held_out = {name: held.dataset for name, held in self._sets.items()}
        try:
            found = warnings_of_held_out(held_out, lock, self.trainer.data_loader.datasets)
        except OlmError as error:  # no reason for one rank to stop
            found = [f"whether held-out documents are trained on is not known: {error}"]
        for text in found:
            self.trainer.say(f"warning: {text}")

    def measure(self, name: str, stop: Callable[[], bool] | None) -> dict[str, float] | None:
        module = self.trainer.train_module
        return self._sets[name].measure(
            module.eval_losses, module.eval_batch, stop=stop, max_batches=self.max_batches
        )
