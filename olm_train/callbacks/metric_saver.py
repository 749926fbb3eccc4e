"""`metrics.jsonl`: one line for each step and one for each evaluation, each exactly once.

    {"step": 12, "time": 1767225600.125, "tokens": 6144, "rows": [88, 96], "order": "9f2c...",
     "train/CE loss": 5.1, ...}
    {"step": 12, "time": 1767225601.5, "eval": {"web": {"CE loss": 5.2, "PPL": 181.3, ...}}}

Numbers are written so that reading them gives the same float64 back; NaN and infinity are null.
`rows` is the half-open range of the schedule's rows that the step was made of, without the ranges
in `skipped` if there are any; `order` is their digest (`olm_data.order.steps`); `time` is that of
the line, in seconds since 1970. A resumed run first removes the lines beyond the step of its
checkpoint, so kills leave no step twice and none out; `starts.jsonl` beside it says how many they
were (`olm_data.audit.run_log`).
Lines that a full disk refuses wait in memory; a checkpoint that would outlive them fails, and is
tried again like any other.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from olm_data.audit.run_log import STARTS, Start, encode_starts, read_starts
from olm_data.bounded_json import MalformedJson, decode_object
from olm_data.errors import printable
from olm_data.json_lines import malformed_log, raw_lines
from olm_data.locate.run import LOG
from olm_data.redaction import redacted
from olm_data.storage.disk import io_errors, write_durable
from olm_train.callbacks.base import Callback
from olm_train.callbacks.environment import device_name


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
        line: dict[str, Any] = {"step": step, "time": _now(), "tokens": trainer.tokens_at(step)}
        line["rows"] = list(trainer.rows_of(step))
        if skipped := trainer.skipped_in(step):
            line["skipped"] = [list(item) for item in skipped]
        self._write({**line, "order": trainer.order_digest(step), **metrics})

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        self._write({"step": step, "time": _now(), "eval": results})

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
            time=_now(),
            command=command(),
            device=device_name(trainer.world.device),
            parameters=sum(p.numel() for p in trainer.train_module.model.parameters()),
            config=trainer.config,
            changes=trainer.config_changes,
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


def _now() -> float:
    """Return the time of a line, to the millisecond."""
    return round(time.time(), 3)


def command() -> str:
    """Return what started this process, with torchrun's most telling options, no credentials."""
    typed = sys.orig_argv[1:]
    if "-m" in typed:
        typed = typed[typed.index("-m") :]
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ranks, local = (int(os.environ.get(n, 1)) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        nodes = [f"--nnodes={ranks // local}"] if ranks > local else []
        launcher = ["torchrun", *nodes, f"--nproc-per-node={local}"]
    return redacted(shlex.join([*launcher, *typed]))


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
    for number, line in raw_lines(path):
        try:
            entry = decode_object(line)
            early = entry["step"] <= step
        except (MalformedJson, KeyError, TypeError) as error:
            raise malformed_log(path, f"line {number}: {printable(str(error))}") from None
        if early:
            kept.append(line)
        else:
            removed += "eval" not in entry
    _replace(path, b"".join(kept))
    return removed


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write_durable(temporary, data)
    os.replace(temporary, path)
