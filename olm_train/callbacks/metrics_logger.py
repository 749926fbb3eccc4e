"""Writes the log of a run: a line a step, an evaluation, a start and an end (`olm_data.run_log`).

A resumed run first removes the lines beyond the step of its checkpoint, so kills leave no step
twice and none out. Lines that a full disk refuses wait in memory; a checkpoint that would outlive
them fails, and is tried again like any other.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from olm_data.bounded_json import JsonObject
from olm_data.errors import ConflictError, OlmError, words
from olm_data.order.steps import clip_ranges
from olm_data.redaction import redacted
from olm_data.run_log.log import (
    ENDS,
    METRICS,
    End,
    Evaluation,
    MetricsWriter,
    Reason,
    Start,
    Step,
    Values,
    append_end,
    append_start,
    is_over,
    keep_until,
    read_starts,
)
from olm_data.storage.store import Store, is_remote
from olm_train.callbacks.base import Callback
from olm_train.callbacks.environment import device_name
from olm_train.distributed.preempt import Preempted

MOST_SAID = 500
"""Characters of why a run ended; the rest is on the terminal."""


@dataclass(kw_only=True)
class MetricsLoggerCallback(Callback):
    """The metrics file, written into the run's folder on rank 0.

    Attributes:
        enabled: write `metrics.jsonl`.
    """

    priority: ClassVar[int] = 3  # the file is open before an evaluation at start-up is logged

    enabled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._writer: MetricsWriter | None = None
        self._end: End | None = None
        self._epochs: dict[int, int] = {}

    def pre_train(self) -> None:
        trainer = self.trainer
        if not trainer.world.main:
            return
        reached = trainer.step if trainer.resumed else None
        own = bool(trainer.checkpoints.saved)  # else it began with the state of another run
        rewound, notes = keep_until(trainer.work_dir, reached, own=own)
        for note in notes:
            trainer.say(f"warning: {note}")
        append_start(trainer.work_dir, self._start(rewound))
        self._writer = MetricsWriter(trainer.work_dir)
        self._epochs.clear()

    def post_step(self) -> None:
        loader = self.trainer.data_loader
        if self._writer is not None and loader.lock is None:
            self._epochs[self.trainer.step] = loader.epoch  # its line is written later

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        loader = self.trainer.data_loader
        tokens = loader.tokens_before(step) if loader.unit == "tokens" else 0
        epoch = self._epochs.pop(step, loader.epoch)
        values: Values = dict(metrics)
        line = Step(step=step, time=_now(), tokens=tokens, epoch=epoch, metrics=values, version=2)
        rows = loader.rows_of_step(step - 1)
        if rows.size:
            first, stop = int(rows[0]), int(rows[-1]) + 1
            skipped, order = clip_ranges(loader.skip, first, stop), loader.order_digest(step - 1)
            line = replace(
                line, epoch=1, rows=(first, stop), skipped=skipped, order=order, version=1
            )
        self._write(line)

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        sets: dict[str, Values] = {name: dict(metrics) for name, metrics in results.items()}
        self._write(Evaluation(step=step, time=_now(), results=sets))

    def state_dict(self) -> JsonObject:
        # A checkpoint is being made: it must not outlive the lines of the steps it contains.
        if self._writer is not None:
            self._writer.sync()
        return {}

    def pending(self) -> list[str]:
        """Return the line of the end, where the run was killed after its last checkpoint."""
        folder = self.trainer.work_dir

        def open_end() -> bool:
            return bool(read_starts(folder)) and not is_over(Store(str(folder)))

        return [f"its end in {ENDS}"] if self.trainer.world.on_main(open_end) else []

    def post_train(self) -> None:
        if self._writer is not None:
            self._writer.sync()  # what waits for a full disk would be lost
        request = self.trainer.cancelled
        if request is None:
            self._end = self._ended("finished")
        else:
            self._end = self._ended("cancelled", request.by, request.why)

    def on_error(self, error: BaseException) -> None:
        if isinstance(error, Preempted):
            request = error.request
            self._end = self._ended(
                "cancelled" if request.cancelled else "stopped", request.by, request.why
            )
        elif not isinstance(error, ConflictError):  # the folder is another run's then
            said = error.what if isinstance(error, OlmError) else str(error)
            self._end = self._ended("failed", type(error).__name__, said)

    def close(self) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.close()
        end, self._end = self._end, None
        if end is not None:
            try:
                append_end(self.trainer.work_dir, end)
                if is_remote(self.trainer.save_folder):  # the last save was before this line
                    lines = (self.trainer.work_dir / ENDS).read_bytes()
                    Store(self.trainer.save_folder).put(ENDS, lines)
            except (OSError, OlmError) as error:  # it must not hide how the run ended
                self.trainer.say(f"warning: {ENDS} could not be written: {error}")

    def _ended(self, reason: Reason, by: str = "", why: str = "") -> End:
        return End(
            step=self.trainer.step,
            time=_now(),
            reason=reason,
            by=words(by),
            why=words(why, MOST_SAID),
        )

    def _start(self, rewound: int) -> Start:
        trainer, loader = self.trainer, self.trainer.data_loader
        return Start(
            step=trainer.step,
            rewound=rewound,
            lock=loader.lock.digest if loader.lock else "",
            global_batch_size=loader.batch_sizes.size(0),
            batch_size_changes=loader.batch_sizes.changes,
            world_size=trainer.world.size,
            skip=loader.skip,
            bad=trainer.bad_steps.rows,
            time=_now(),
            command=command(),
            device=device_name(trainer.world.device),
            parameters=trainer.train_module.num_params
            if trainer.world.stages > 1
            else sum(p.numel() for p in trainer.train_module.model.parameters()),
            config=trainer.config,
            changes=trainer.config_changes,
        )

    def _write(self, line: Step | Evaluation) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(line)
        except OSError as error:
            self.trainer.say(
                f"warning: {METRICS} could not be written: {error.strerror}\n"
                "  training goes on; its lines are kept in memory until they can be"
            )


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
