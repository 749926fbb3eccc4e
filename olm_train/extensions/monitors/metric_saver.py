"""The latest metrics as JSON files of the save folder: at the end of a run, and at chosen steps.

    metrics of a step -> match a pattern? -> metrics_step500.json | metrics.json, local or remote

For programs that want one file to read. What was captured is in the checkpoints, so a run that was
killed writes the files of one that was not. The log of a run, each step of it, is `metrics.jsonl`
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

from olm_data.bounded_json import JsonObject, MalformedJson, decode_object
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
    """Writes the latest metrics as JSON files, on rank 0; an object, metric by metric.

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
        self._metrics: dict[str, float | None] = {}
        self._step = 0

    def explicit_steps(self) -> dict[str, list[int]]:
        interval = [] if self.save_interval is None else [self.save_interval]
        return {"fixed_steps": self.fixed_steps or [], "save_interval": interval}

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._capture(step, metrics)
        every = self.save_interval
        if (every is not None and step % every == 0) or step in (self.fixed_steps or ()):
            self._write(self.step_metrics_fname.replace(STEP, str(step)))

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for name, values in results.items():
            self._capture(step, {f"eval/{name}/{key}": value for key, value in values.items()})

    def state_dict(self) -> JsonObject:
        return {"step": self._step, "metrics": dict(self._metrics)}

    def load_state_dict(self, state: JsonObject) -> None:
        self._step, kept = state.get("step", 0), state.get("metrics", {})
        self._metrics = {name: value for name, value in kept.items() if self._wants(name)}

    def pending(self) -> list[str]:
        """Return the last file, where the run was killed before it was there."""
        name = self.final_metrics_fname
        written = self.trainer.world.on_main(lambda: self._written(name))
        return [] if written or not self._metrics else [name]

    def post_train(self) -> None:
        self._write(self.final_metrics_fname)

    def _capture(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if self._wants(name):
                self._metrics[name] = value if math.isfinite(value) else None
        self._step = step

    def _wants(self, name: str) -> bool:
        patterns = self.metrics_to_capture
        return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)

    def _write(self, name: str) -> None:
        trainer = self.trainer
        if not trainer.world.main:
            return
        content = {"step": self._step, "metrics": self._metrics}
        text = json.dumps(content, indent=1, allow_nan=False)
        try:
            Store(trainer.save_folder).put(name, text.encode() + b"\n")
        except (ResourceError, StorageError, OSError) as error:
            trainer.say(f"warning: {name} could not be written: {error}")

    def _written(self, name: str) -> bool:
        """Whether a file is there, of the last step; a later evaluation may have added to it."""
        try:
            found = decode_object(Store(self.trainer.save_folder).read(name))
        except (FileNotFoundError, MalformedJson):
            return False
        return found.get("step") == self._step
