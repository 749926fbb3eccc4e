"""`olm-data verify RUN`: did a run train on what its lock planned, each step on its own rows?

    lock -> rows planned ---------------.
    log  -> rows of each step, merged --+-- tally by (stage, source, epoch) --> Account, one each
    skip -> rows left out on purpose ---'                                   \\-> problems, in words
    lock, rows of each step -> order digest == the logged one

Due is what the plan has up to the last row the run has reached. A run agrees if every due row was
trained once or skipped, each step had its rows in their order and its tokens, and nothing else was
trained. Tallying takes the ends of stretches of rows, never each row. The digest binds the log to
the lock; it is no signature: whoever can write a log can write another one that is sound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from olm_data.counts import counted
from olm_data.errors import InputError
from olm_data.mixture.lock import Lock
from olm_data.order.schedule import Schedule
from olm_data.order.steps import KeptRows, Range, StepSizes, clip_ranges, merge_ranges, order_digest
from olm_data.printing import Columns, Difference, Ordinal
from olm_data.run_log.log import METRICS, STARTS, RunLog, Start, Step
from olm_data.run_log.run_folder import refuse_without_lock

Key = tuple[int, int, int]
"""(stage, source, epoch), by number."""

MOST_SHOWN = 3


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one epoch of one source in one stage.

    Attributes:
        stage, source: names.
        epoch: how often the source was gone through before, from 0.
        planned: rows of it in the whole lock.
        due: rows of it up to the last row reached.
        skipped: due rows left out on purpose, or of a step that was not taken.
        trained: rows trained, a repeated one each time.
        difference: rows trained beyond those due (below 0: missed).
    """

    stage: str
    source: str
    epoch: Ordinal
    planned: int
    due: int
    skipped: int
    trained: int
    difference: Difference


class TrainingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned and what was trained.

    Attributes:
        agrees: whether the run trained what was planned, as far as it went.
        run, lock: the run's folder, the lock's digest.
        sequence_length: tokens of a row.
        steps, tokens: steps logged, and the tokens in them as counted on the devices.
        not_taken: steps that left the weights as they were: their loss or gradient was a spike or
            not finite. Their rows count as skipped.
        reached: one past the last row of the steps logged.
        skipped: ranges of rows before that which no step has, or which a step leaves out.
        accounts: in the order of stages, sources and epochs.
        starts: all starts of the run.
        problems: how the log differs from the plan, in words; none if it agrees.
        rewound: steps that were trained again after a kill.
    """

    agrees: bool
    run: str
    lock: str
    sequence_length: int
    steps: int
    tokens: int
    not_taken: list[int]
    reached: int
    skipped: list[Range]
    accounts: list[Account]
    starts: list[Start]
    problems: list[str]
    rewound: int

    COLUMNS: ClassVar = {
        "accounts": Columns(total=True),
        "starts": Columns(("step=start at step", "bad=rows left out")),
    }


def read_log(folder: str | Path) -> RunLog:
    """Return the log of a run, both files of it.

    Raises:
        InputError: one of them is missing.
        ValidationError: a line is not what a run writes.
    """
    log = RunLog.read(folder)
    if not log.starts or not (log.folder / METRICS).is_file():
        raise InputError(
            f"there is no log of a run here: {METRICS if log.starts else STARTS} is missing",
            where=str(folder),
            why="what was trained is known from the run's own log alone",
            fix="give the trainer.save_folder of a run whose "
            "trainer.callbacks.metrics_logger was not switched off",
        )
    return log


def verify_training(
    lock: Lock, log: RunLog, *, watch: Callable[[int, int], None] | None = None
) -> TrainingReport:
    """Compare the log of a run with the lock it was trained on.

    Args:
        watch: called with (steps checked, steps in all).
    """
    total, latest = lock.total_rows, log.starts[-1]
    problems = [
        f"a start of the run had another lock, {digest}; this one is {lock.digest}"
        for digest in dict.fromkeys(start.lock for start in log.starts)
        if digest not in lock.digests(0)
    ]
    problems += _step_problems(lock, log, latest.batch_sizes, watch)
    pieces = sorted(piece for step in log.steps for piece in _without(step.rows, step.skipped))
    beyond = [(max(a, total), b) for a, b in pieces if b > total]
    problems += _in_words("not in the lock", beyond)
    pieces = list(clip_ranges(pieces, 0, total))
    once, repeated = merge_ranges(pieces), _repeated(pieces)
    reached = once[-1][1] if once else 0
    skipped = clip_ranges(merge_ranges(latest.skip), 0, reached)
    missed = [
        hole
        for gap in _without((0, reached), once)
        for hole in _without(gap, clip_ranges(skipped, *gap))
    ]
    against = [both for a, b in once for both in clip_ranges(skipped, a, b)]
    problems += _in_words("trained more than once", repeated)
    problems += _in_words("neither trained nor skipped", missed)
    problems += _in_words("trained though the run skips them", against)

    not_taken = [step for step in log.steps if not step.taken]
    idle = clip_ranges(
        [item for step in not_taken for item in _without(step.rows, step.skipped)], 0, total
    )
    accounts = _accounts(
        lock,
        planned=[(0, total)],
        due=[(0, reached)],
        trained=[*once, *repeated],
        skipped=skipped,
        idle=idle,
    )
    return TrainingReport(
        agrees=not problems,
        run=str(log.folder),
        lock=lock.digest,
        sequence_length=lock.sequence_length,
        steps=len(log.steps),
        tokens=sum(step.trained or 0 for step in log.steps if step.taken),
        not_taken=[step.step for step in not_taken],
        reached=reached,
        skipped=_without((0, reached), once),
        accounts=accounts,
        starts=log.starts,
        problems=problems,
        rewound=sum(start.rewound for start in log.starts),
    )


def _accounts(lock: Lock, **ranges: Iterable[Range]) -> list[Account]:
    """Return what became of the rows of each source in each epoch of each stage.

    Args:
        ranges: rows that were planned, due, trained, skipped, and trained without effect (idle).
    """
    schedule = lock.schedule()
    names = [stage.name for stage in lock.stages]  # several parts of one stage are one
    whole = [names.index(name) for name in names]
    counts = {name: _tally(schedule, whole, rows) for name, rows in ranges.items()}
    trained, skipped = counts["trained"] - counts["idle"], counts["skipped"] + counts["idle"]
    return [
        Account(
            stage=names[key[0]],
            source=lock.sources[key[1]].name,
            epoch=key[2],
            planned=rows,
            due=counts["due"][key],
            skipped=skipped[key],
            trained=trained[key],
            difference=trained[key] + skipped[key] - counts["due"][key],
        )
        for key, rows in sorted(counts["planned"].items())
    ]


def find_lock(log: RunLog, given: str | None) -> Lock:
    """Return the lock of a run: the given one, else a copy that a checkpoint of the run holds.

    Raises:
        InputError: there is none, or the run was trained on data from no lock.
        ValidationError: the lock is damaged.
    """
    refuse_without_lock(log)
    copies = sorted(log.folder.glob("step*[0-9]/mixture.lock.json"))
    if given is None and not copies:
        raise InputError(
            "the run has no checkpoint with a copy of its lock",
            where=str(log.folder),
            fix="say which lock it was trained on: --lock mixture.lock.json",
        )
    return Lock.read(given or copies[-1])


def _step_problems(
    lock: Lock, log: RunLog, batch_sizes: StepSizes, watch: Callable[[int, int], None] | None
) -> list[str]:
    """Return what is wrong with single steps, the first few of each kind."""
    found: dict[str, list[str]] = {"number": [], "rows": [], "tokens": [], "order": []}
    length = lock.sequence_length
    for expected, step in enumerate(log.steps, start=1):
        count = step.rows[1] - step.rows[0] - sum(b - a for a, b in step.skipped)
        batch_tokens = batch_sizes.size(step.step - 1)
        if step.step != expected:
            found["number"].append(f"step {step.step:,} stands where step {expected:,} should")
        if count != batch_tokens // length:
            found["rows"].append(
                f"step {step.step:,} has {count:,} rows, not {batch_tokens // length:,}"
            )
        elif reason := _other_order(lock, step, count):
            found["order"].append(f"step {step.step:,} (line {step.line:,} of {METRICS}): {reason}")
        for tokens, planned, what in (
            (step.trained, batch_tokens, "trained on"),
            (step.tokens, batch_sizes.before(step.step), "ends at"),
        ):
            if tokens is not None and tokens != planned:
                found["tokens"].append(
                    f"step {step.step:,} {what} {tokens:,} tokens, not {planned:,}"
                )
        if watch is not None and expected % 1024 == 0:
            watch(expected, len(log.steps))
    return [text for kind in found.values() for text in _first(kind)]


def _other_order(lock: Lock, step: Step, count: int) -> str | None:
    """Return how the order of a step's `count` rows is not the lock's, None if it is."""
    first, end = step.rows
    if end > lock.total_rows:
        return f"its rows end at {end:,}; the lock has {lock.total_rows:,}"
    rows = KeptRows(lock.total_rows, step.skipped).rows(np.arange(first, first + count))
    if (rows[0], rows[-1] + 1) != step.rows:
        return "its rows begin or end with a skipped one"
    if step.order is None:
        return "it has no order digest"
    if not lock.gave(step.order, rows):
        return (
            f"its order digest is {step.order}; rows [{first:,}, {end:,}) of the lock give "
            f"{order_digest(lock.digest, rows)}"
        )
    return None


def _tally(schedule: Schedule, whole: Sequence[int], ranges: Iterable[Range]) -> Counter[Key]:
    """Count the rows of half-open ranges by stage (`whole[stage]`), source and epoch."""
    counts: Counter[Key] = Counter()
    ends = [0, *schedule.stage_ends.tolist()]
    sizes = schedule.source_rows.tolist()
    for first, stop in ranges:
        for stage in range(len(schedule.stages)):
            low, high = max(first, ends[stage]), min(stop, ends[stage + 1])
            if low >= high:
                continue
            spans = zip(schedule.drawn_before(low), schedule.drawn_before(high), strict=True)
            for source, (a, b) in enumerate(spans):
                while a < b:  # from ordinal a on, epoch by epoch
                    epoch = int(a) // sizes[source]
                    end = min(int(b), (epoch + 1) * sizes[source])
                    counts[whole[stage], source, epoch] += end - int(a)
                    a = end
    return counts


def _without(span: Range, holes: Iterable[Range]) -> list[Range]:
    """Return what is left of a range without sorted ranges inside it."""
    left, start = [], span[0]
    for a, b in holes:
        if a > span[1]:
            break
        if start < a:
            left.append((start, a))
        start = max(start, b)
    if start < span[1]:
        left.append((start, span[1]))
    return left


def _repeated(pieces: Sequence[Range]) -> list[Range]:
    """Return the parts of sorted ranges that an earlier one covers already."""
    found, end = [], 0
    for a, b in pieces:
        if a < end:
            found.append((a, min(b, end)))
        end = max(end, b)
    return found


def _in_words(what: str, ranges: Sequence[Range]) -> list[str]:
    if not ranges:
        return []
    shown = ", ".join(f"[{a:,}, {b:,})" for a, b in ranges[:MOST_SHOWN])
    more = f" and {len(ranges) - MOST_SHOWN:,} more ranges" if len(ranges) > MOST_SHOWN else ""
    count = sum(b - a for a, b in ranges)
    return [f"{counted(count, 'row')} {what}: {shown}{more}"]


def _first(texts: list[str]) -> list[str]:
    rest = len(texts) - MOST_SHOWN
    return texts[:MOST_SHOWN] + ([f"... and {rest:,} more like this"] if rest > 0 else [])
