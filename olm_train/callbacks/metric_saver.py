"""Writes the log of a run: a line a step, an evaluation and a start (`olm_data.run_log.log`).

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
from typing import Any, ClassVar

from olm_data.order.skip import clip_ranges
from olm_data.redaction import redacted
from olm_data.run_log.log import (
    METRICS,
    Evaluation,
    MetricsWriter,
    Start,
    Step,
    Values,
    append_start,
    keep_until,
)
from olm_train.callbacks.base import Callback
from olm_train.callbacks.environment import device_name


@dataclass(kw_only=True)
class MetricSaverCallback(Callback):
    """The metrics file, written into the run's folder on rank 0.

    Attributes:
        enabled: write `metrics.jsonl`.
    """

    priority: ClassVar[int] = 3  # the file is open before an evaluation at start-up is logged

    enabled: bool = True

    def __post_init__(self) -> None:
        self._writer: MetricsWriter | None = None

    def pre_train(self) -> None:
        trainer = self.trainer
        if not trainer.world.main:
            return
        reached = trainer.step if trainer.resumed else None
        rewound, notes = keep_until(trainer.work_dir, reached)
        for note in notes:
            trainer.say(f"warning: {note}")
        append_start(trainer.work_dir, self._start(rewound))
        self._writer = MetricsWriter(trainer.work_dir)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        loader = self.trainer.data_loader
        rows = loader.rows_of_step(step - 1)
        first, last = int(rows[0]), int(rows[-1])
        self._write(
            Step(
                step=step,
                time=_now(),
                tokens=loader.tokens_before(step),
                rows=(first, last + 1),
                skipped=clip_ranges(loader.skip, first, last + 1),
                order=loader.order_digest(step - 1),
                metrics=dict(metrics),
            )
        )

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        sets: dict[str, Values] = {name: dict(metrics) for name, metrics in results.items()}
        self._write(Evaluation(step=step, time=_now(), results=sets))

    def state_dict(self) -> dict[str, Any]:
        # A checkpoint is being made: it must not outlive the lines of the steps it contains.
        if self._writer is not None:
            self._writer.sync()
        return {}

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _start(self, rewound: int) -> Start:
        trainer, loader = self.trainer, self.trainer.data_loader
        return Start(
            step=trainer.step,
            rewound=rewound,
            lock=loader.lock.digest,
            **loader.batch_sizes.record(),
            world_size=trainer.world.size,
            skip=loader.skip,
            bad=trainer.bad_steps.rows,
            time=_now(),
            command=command(),
            device=device_name(trainer.world.device),
            parameters=sum(p.numel() for p in trainer.train_module.model.parameters()),
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
