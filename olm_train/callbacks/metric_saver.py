"""`metrics.jsonl`: one line for each step and one for each evaluation, each exactly once.

    {"step": 12, "tokens": 6144, "rows": [88, 96], "order": "9f2c...", "train/CE loss": 5.1, ...}
    {"step": 12, "eval": {"web": {"CE loss": 5.2, "PPL": 181.3, "tokens": 4080}}}

Numbers are written so that reading them gives the same float64 back; NaN and infinity are null.
`rows` is the half-open range of the schedule's rows that the step was made of, without the ranges
in `skipped` if there are any; `order` is their digest (`olm_data.mixture.steps`). A resumed run
first removes the lines beyond the step of its checkpoint, so kills leave no step twice and none
out; `starts.jsonl` beside it says how many they were (`olm_data.audit.run_log`).
Lines that a full disk refuses wait in memory; a checkpoint that would outlive them fails, and is
tried again like any other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from olm_data.audit.run_log import STARTS, Start, encode_starts, read_starts
from olm_data.locate.run import LOG
from olm_data.storage.disk import io_errors, write_durable
from olm_train.callbacks.base import Callback


@dataclass(frozen=True, kw_only=True)
class MetricSaverConfig:
    """The metrics file.

    Attributes:
        enabled: write `metrics.jsonl`.
    """

    enabled: bool = True

    def build(self) -> MetricSaverCallback:
        """Return the callback."""
        return MetricSaverCallback()


class MetricSaverCallback(Callback):
    """Writes `metrics.jsonl` into the save folder, on rank 0."""

    priority: ClassVar[int] = 3  # the file is open before an evaluation at start-up is logged

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._end = 0  # bytes of whole lines in the file
        self._pending = b""  # lines that the disk has not taken yet

    def pre_train(self) -> None:
        if not self.trainer.main:
            return
        path, rewound = self.trainer.work_dir / LOG, 0
        if path.exists():
            rewound = keep_until(path, self.trainer.step if self.trainer.resumed else -1)
        self._log_start(rewound)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed in `close`
        self._end = self._file.tell()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        trainer = self.trainer
        line: dict[str, Any] = {"step": step, "tokens": trainer.tokens_at(step)}
        line["rows"] = list(trainer.rows_of(step))
        if skipped := trainer.skipped_in(step):
            line["skipped"] = [list(item) for item in skipped]
        self._write({**line, "order": trainer.order_digest(step), **metrics})

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        self._write({"step": step, "eval": results})

    def state_dict(self) -> dict[str, Any]:
        # A checkpoint is being made: it must not outlive the lines of the steps it contains.
        if self._file is not None:
            with io_errors(self._file.name, writing=True):
                self._flush()
                os.fsync(self._file.fileno())
        return {}

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _log_start(self, rewound: int) -> None:
        trainer, loader = self.trainer, self.trainer.data_loader
        start = Start(
            step=trainer.step,
            rewound=rewound,
            lock=loader.lock.digest,
            **loader.batch_sizes.record(),
            world_size=trainer.world.size,
            skip=loader.skip,
            bad=trainer.bad_rows,
        )
        starts = [*read_starts(trainer.work_dir), start]
        _replace(trainer.work_dir / STARTS, encode_starts(starts))

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        waiting = bool(self._pending)
        plain = {name: _plain(value) for name, value in line.items()}
        self._pending += json.dumps(plain, allow_nan=False).encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            if not waiting:
                self.trainer.say(
                    f"warning: {LOG} could not be written: {error.strerror}\n"
                    "  training goes on; its lines are kept in memory until they can be"
                )

    def _flush(self) -> None:
        """Write what is pending; where the disk takes only a part, take that back."""
        assert self._file is not None
        try:
            written = 0
            while written < len(self._pending):
                written += self._file.write(self._pending[written:])
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += written
        self._pending = b""


def _plain(value: Any) -> Any:
    """Return a JSON value with null for what is no number: JSON has none."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_until(path: Path, step: int) -> int:
    """Remove the lines of steps beyond `step`, and a torn last line, atomically.

    Returns:
        How many steps were removed.
    """
    kept, removed = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        entry = json.loads(line)
        if entry["step"] <= step:
            kept.append(line)
        else:
            removed += "eval" not in entry
    _replace(path, b"".join(kept))
    return removed


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write_durable(temporary, data)
    os.replace(temporary, path)
