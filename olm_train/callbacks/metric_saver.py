"""The latest metrics as JSON files of the save folder: at the end of a run, and at chosen steps.

    metrics of a step -> match a pattern? -> metrics_step500.json | metrics.json, local or remote

For programs that want one file to read. The log of a run, each step of it, is `metrics.jsonl`
(`metrics_logger`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from msgspec import Meta

from olm_data.config.hints import PositiveInt
from olm_data.errors import ResourceError, StorageError
from olm_data.storage.store import Store
from olm_train.callbacks.base import Callback

STEP = "{step}"
FileName = Annotated[str, Meta(pattern=r"^[^/]+\.json$", description="the name of a .json file")]
StepFileName = Annotated[
    str,
    Meta(pattern=r"^[^/]*\{step\}[^/]*\.json$", description="a .json file's name with {step}"),
]


@dataclass(kw_only=True)
class MetricSaverCallback(Callback):
    """Files with the latest metrics, written on rank 0; an object, metric by metric.

    Attributes:
        enabled: write them, where `metric_saver` is given at all.
        step_metrics_fname: name of the file of a step, with `{step}` for its number.
        final_metrics_fname: name of the file at the end of the run.
        metrics_to_capture: patterns of the metrics, such as `train/*`; null: all. Those of an
            evaluation are `eval/NAME/METRIC`.
        save_interval: steps between files of steps; null: none.
        fixed_steps: further steps with a file.
    """

    enabled: bool = True
    step_metrics_fname: StepFileName = "metrics_step{step}.json"
    final_metrics_fname: FileName = "metrics.json"
    metrics_to_capture: list[str] | None = None
    save_interval: PositiveInt | None = None
    fixed_steps: list[PositiveInt] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._metrics: dict[str, float] = {}
        self._step = 0

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._capture(step, metrics)
        every = self.save_interval
        if (every is not None and step % every == 0) or step in (self.fixed_steps or ()):
            self._write(self.step_metrics_fname.replace(STEP, str(step)))

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for name, values in results.items():
            self._capture(step, {f"eval/{name}/{key}": value for key, value in values.items()})

    def post_train(self) -> None:
        self._write(self.final_metrics_fname)

    def _capture(self, step: int, metrics: Mapping[str, float]) -> None:
        patterns = self.metrics_to_capture
        for name, value in metrics.items():
            if patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns):
                self._metrics[name] = value
        self._step = step

    def _write(self, name: str) -> None:
        trainer = self.trainer
        if not trainer.world.main:
            return
        finite = {n: v if math.isfinite(v) else None for n, v in self._metrics.items()}
        text = json.dumps({"step": self._step, "metrics": finite}, indent=1, allow_nan=False)
        try:
            Store(trainer.save_folder).put(name, text.encode() + b"\n")
        except (ResourceError, StorageError, OSError) as error:
            trainer.say(f"warning: {name} could not be written: {error}")
