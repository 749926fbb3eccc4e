"""Spikes of loss and gradient norm, how often they come, and the documents of the steps they hit.

    metrics of a step -> above mean + threshold * std of the last calm steps, or NaN? -> spike
        -> spike/SpikeScore, a line on the terminal, spike-step00000012.json with the documents

A spike does not enter the window that later steps are compared with, so it hides none of them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import PositiveInt
from olm_data.decoding import convert
from olm_data.errors import OlmError
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM, SPIKE_SCORE, SPIKE_SCORE_TOTAL
from olm_train.callbacks.base import Callback
from olm_train.callbacks.notice import Event
from olm_train.stability.report import write_report

FEWEST = 8
"""Calm steps before which nothing is called a spike: a standard deviation of fewer means little."""


class SpikeState(msgspec.Struct, kw_only=True):
    """What a resumed run needs.

    Attributes:
        calm: the last values of each watched metric that were no spikes.
        spikes: steps that were, as far as the rolling window reaches.
        steps, total: steps seen, and spikes among them.
    """

    calm: dict[str, list[float]] = {}
    spikes: list[int] = []
    steps: int = 0
    total: int = 0


@dataclass(kw_only=True)
class StabilityMonitorCallback(Callback):
    """Counts spikes of the loss and of the gradient norm.

    Attributes:
        enabled: look for spikes, where `stability_monitor` is given at all.
        window_size: calm steps that a value is compared with.
        rolling_window: steps of `spike/SpikeScore`, the share of spikes among the last ones; it is
            logged once there were so many.
        threshold_std: standard deviations above the mean from which on a value is a spike.
        loss_metric_name: the first metric that is watched.
        grad_norm_metric_name: the second one.
    """

    priority: ClassVar[int] = 2  # what it adds is there when the others look

    enabled: bool = True
    window_size: Annotated[int, Meta(ge=FEWEST)] = 128
    rolling_window: PositiveInt = 10_000
    threshold_std: Annotated[float, Meta(gt=0)] = 6.0
    loss_metric_name: str = CE_LOSS
    grad_norm_metric_name: str = GRAD_NORM

    def __post_init__(self) -> None:
        super().__post_init__()
        self._state = SpikeState()
        self._calm: dict[str, deque[float]] = {}
        self._reports: ThreadPoolExecutor | None = None

    def state_dict(self) -> JsonObject:
        self._state.calm = {name: list(values) for name, values in self._calm.items()}
        return msgspec.to_builtins(self._state)

    def load_state_dict(self, state: JsonObject) -> None:
        self._state = convert(state, SpikeState)
        self._calm = {
            name: deque(values, maxlen=self.window_size)
            for name, values in self._state.calm.items()
        }

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        names = (self.loss_metric_name, self.grad_norm_metric_name)
        watched = {name: metrics[name] for name in names if name in metrics}
        found = [name for name, value in watched.items() if self._spikes(name, value)]
        state = self._state
        state.steps += 1
        if found:
            state.total += 1
            state.spikes.append(step)
            self._tell(step, found, watched)
        state.spikes = [each for each in state.spikes if each > step - self.rolling_window]
        if state.steps >= self.rolling_window:
            metrics[SPIKE_SCORE] = len(state.spikes) / self.rolling_window
        metrics[SPIKE_SCORE_TOTAL] = state.total / state.steps

    def close(self) -> None:
        if self._reports is not None:
            self._reports.shutdown(wait=True)
            self._reports = None

    def _spikes(self, name: str, value: float) -> bool:
        """Whether a value is a spike; one that is not enters the window."""
        calm = self._calm.setdefault(name, deque(maxlen=self.window_size))
        if not math.isfinite(value):
            return True
        if len(calm) >= FEWEST:
            mean = statistics.fmean(calm)
            if value > mean + self.threshold_std * statistics.pstdev(calm, mean):
                return True
        calm.append(value)
        return False

    def _tell(self, step: int, found: Sequence[str], watched: Mapping[str, float]) -> None:
        """Name the documents of a step beside the training: reading them may take a while."""
        trainer = self.trainer
        if not trainer.world.main:
            return
        loader = trainer.data_loader
        rows = [int(row) for row in loader.rows_of_step(step - 1)]
        path = trainer.work_dir / f"spike-step{step:08d}.json"
        values = ", ".join(f"{name} {watched[name]:.4g}" for name in found)
        names = (self.loss_metric_name, self.grad_norm_metric_name)
        loss, grad_norm = (str(watched.get(name, "not logged")) for name in names)

        def report() -> None:
            try:
                documents = write_report(path, step, loss, grad_norm, loader.lock, rows)
            except (OlmError, OSError) as error:  # the spike is told all the same
                documents = f"its documents could not be written: {error}"
            trainer.say(f"warning: spike at step {step:,}: {values}; {documents}")
            trainer.tell(Event.spike, step, f"{values}; {documents}")

        self._reports = self._reports or ThreadPoolExecutor(1, "spikes")
        self._reports.submit(report)
