"""Check a run's log against a lock: was each step made of the rows that the lock says?

    metrics.jsonl, step by step: rows follow the step before -> as many as a step has -> not skipped
                                 by the configuration -> their order digest is the logged one

The first step that differs ends the check. The digest binds the log to the lock; it is no
signature: whoever can write a log can write another one that is sound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from olm_data.errors import InputError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.order.skip import KeptRows, Range, clip_ranges
from olm_data.order.steps import order_digest
from olm_data.run_log.log import METRICS, Step
from olm_data.run_log.run import Run

Watch = Callable[[int, int], None]
"""`watch(steps checked, steps in all)`."""


@dataclass(frozen=True, kw_only=True)
class LogReport:
    """A log that agrees with the lock.

    Attributes:
        lock: digest of the lock.
        steps: steps checked, 1 to `steps`.
        rows: global rows the log reaches to, skipped ones included.
        skipped: ranges of rows that were left out.
    """

    lock: str
    steps: int
    rows: int
    skipped: tuple[Range, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)


def verify_log(lock: Lock, run: Run, *, watch: Watch | None = None) -> LogReport:
    """Recompute the order of every logged step and compare.

    Raises:
        InputError: there is no log, or none with order digests.
        ValidationError: the first step that differs.
    """
    where = run.folder / METRICS
    if not run.steps:
        raise InputError(
            "the run has logged no step",
            where=str(where),
            fix="train first; trainer.callbacks.metric_saver writes the log",
        )
    sizes = run.batch_sizes.per(lock.sequence_length)
    consumed = 0
    for count, step in enumerate(run.steps, start=1):
        reason = _difference(lock, run, step, count, consumed, sizes.size(count - 1))
        if reason is not None:
            raise ValidationError(
                f"the log differs from the lock at step {count:,}",
                where=f"{where}, line {step.line}",
                why=reason,
                fix="give the lock the run was trained with; if it is the one, the log was changed "
                "or the run did not train on what it says",
            )
        consumed = step.rows[1]
        if watch is not None and count % 1024 == 0:
            watch(count, len(run.steps))
    return LogReport(
        lock=lock.digest, steps=len(run.steps), rows=consumed, skipped=run.skipped_so_far()
    )


def _difference(
    lock: Lock, run: Run, step: Step, number: int, consumed: int, size: int
) -> str | None:
    """Return how a logged step differs from step `number` of the lock, None if it does not."""
    first, end = step.rows
    if step.step != number:
        return f"the line is of step {step.step:,}: steps are missing, repeated or out of order"
    if step.order is None:
        return "the line has no order digest"
    if step.tokens != run.batch_sizes.before(number):
        return f"{step.tokens:,} tokens, not {run.batch_sizes.before(number):,}"
    if first < consumed:
        return f"its rows begin at {first:,}; the step before ended at {consumed:,}"
    if end > lock.total_rows:
        return f"its rows end at {end:,}; the lock has {lock.total_rows:,}"
    count = end - first - sum(b - a for a, b in step.skipped)
    if count != size:
        return f"{count:,} rows, not {size:,}"
    kept = KeptRows(lock.total_rows, step.skipped)
    rows = kept.rows(np.arange(first, first + size, dtype=np.int64))
    if (rows[0], rows[-1] + 1) != step.rows:
        return "its rows begin or end with a skipped one"
    for a, b in clip_ranges(run.configured_skip, first, end):
        if ((rows >= a) & (rows < b)).any():
            return f"it has rows of [{a:,}, {b:,}), which the configuration skips"
    expected = order_digest(lock.digest, rows)
    if step.order != expected:
        return f"its order digest is {step.order}; rows [{first:,}, {end:,}) of the lock give " + (
            expected
        )
    return None
