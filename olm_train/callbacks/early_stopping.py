"""Ends a run whose held-out loss no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import PositiveInt
from olm_data.decoding import convert
from olm_data.errors import UsageError, printable, suggest
from olm_data.run_log.metric_names import EVAL_CE_LOSS, EVAL_MERGED, EVAL_TASK, of_averaged
from olm_train.callbacks.base import Callback
from olm_train.callbacks.evaluations import Evaluations


class Best(msgspec.Struct, kw_only=True):
    """What a resumed run needs: the best value, the step of it, and evaluations since without a
    better one; None before the first evaluation."""

    value: float | None = None
    step: int = 0
    waited: int = 0


@dataclass(kw_only=True)
class EarlyStoppingCallback(Callback):
    """Cancels the run after `patience` evaluations in a row without a better value.

    Attributes:
        enabled: watch, where `early_stopping` is given at all.
        patience: evaluations, not steps.
        dataset: name of the held-out data set, of merged weights `merged/NAME`; default: the mean
            over all of an evaluation of the weights in training.
        metric: of its results.
        mode: `min`: lower is better; `max`: higher is.
        min_delta: by how much a value has to be better to count as such.
    """

    enabled: bool = True
    patience: PositiveInt = 5
    dataset: str | None = None
    metric: str = EVAL_CE_LOSS
    mode: Literal["min", "max"] = "min"
    min_delta: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._best = Best()

    def pre_train(self) -> None:
        """End a run that has waited long enough; refuse to wait for what nothing here evaluates.

        Raises:
            UsageError: there is no evaluator, or none of them knows the data set.
        """
        self._stop_if_due()
        callbacks = self.trainer.callbacks.values()
        if not all(type(callback).__module__.startswith("olm_train.") for callback in callbacks):
            return  # one that is not ours may evaluate whatever it likes
        sets = [name for c in callbacks if isinstance(c, Evaluations) for name in c.folders()]
        if self.dataset is None:
            known = [name for name in sets if not name.startswith(EVAL_TASK)]
        else:
            ends = [end for c in callbacks if (end := getattr(c, "output_suffix", None))]
            known = [*sets, *(of_averaged(name, end) for name in sets for end in ends)]
        if not known or self.dataset not in (None, *known):
            raise UsageError(
                f"no callback evaluates {printable(self.dataset or 'a data set')}: nothing would "
                "stop the run",
                where="trainer.callbacks.early_stopping",
                fix=suggest(str(self.dataset), known) if known else "add lm_evaluator",
            )

    def state_dict(self) -> JsonObject:
        return msgspec.to_builtins(self._best)

    def load_state_dict(self, state: JsonObject) -> None:
        self._best = convert(state, Best)

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        value = self._value(results)
        if value is None:
            return
        sign = 1.0 if self.mode == "min" else -1.0
        best = self._best
        if best.value is None or sign * value < sign * best.value - self.min_delta:
            self._best = Best(value=value, step=step)
            return
        best.waited += 1
        self._stop_if_due()

    def _stop_if_due(self) -> None:
        best = self._best
        if best.value is not None and best.waited >= self.patience:
            self.trainer.cancel_run(
                f"{self.metric} has not been better than {best.value:.4f} of step {best.step:,} "
                f"for {best.waited} evaluation{'s' if best.waited > 1 else ''}",
                by="early_stopping",
            )

    def _value(self, results: Mapping[str, Mapping[str, float]]) -> float | None:
        """Return what is compared, infinite where it is NaN; None: other data sets were looked at.

        Raises:
            UsageError: there is no such metric.
        """
        if self.dataset is not None:
            results = {n: each for n, each in results.items() if n == self.dataset}
        else:
            results = {
                n: each for n, each in results.items() if not n.startswith((EVAL_MERGED, EVAL_TASK))
            }
        if not results:
            return None
        for name, each in results.items():
            if self.metric not in each:
                raise UsageError(
                    f"the evaluation {name} has no {self.metric!r}, but {', '.join(each)}",
                    where="trainer.callbacks.early_stopping.metric",
                )
        value = math.fsum(each[self.metric] for each in results.values()) / len(results)
        worst = math.inf if self.mode == "min" else -math.inf
        return worst if math.isnan(value) else value
