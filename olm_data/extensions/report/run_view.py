"""What a page shows of a run, kept up with its folder as it grows.

    metrics.jsonl --LogTail--> curves, evaluations --.
    starts, ends, spike and bad steps, checkpoints --+--> Update: what a page has not yet
    ledger/ -> loss by source and by place ----------+
    config.json -> lock -> mixture drawn, documents -'

Only what is new is read and sent: a page says by a token what it has. Reads files of the run and of
its data, nothing else; all texts are made harmless here.

What a run has drawn of each source so far, and what its stages asked for.

lock, rows passed, rows skipped -> Share of each source
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from threading import Lock as Mutex
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from olm_data.bounded_json import JsonObject, MalformedJson, decode_object
from olm_data.counts import duration, scaled
from olm_data.errors import InputError, OlmError, shown
from olm_data.extensions.report.curves import Curves, LedgerCurves, LedgerTail, Points
from olm_data.extensions.report.evaluations import (
    EvaluationPoint,
    EvaluationTable,
    SetRow,
    TaskRow,
    point,
)
from olm_data.extensions.report.step_documents import StepDocuments, harmless, step_documents
from olm_data.extensions.watching.follow import LogTail
from olm_data.extensions.watching.watched import WatchedTail
from olm_data.mixture.lock import Lock, lock_of_run
from olm_data.order.schedule import Schedule
from olm_data.order.steps import Range, merge_ranges
from olm_data.path_kinds import nearest
from olm_data.regular_files import read_regular
from olm_data.rows.views import LockRows
from olm_data.run_log.log import METRICS, End, Evaluation, Start, read_ends, read_starts
from olm_data.run_log.metric_names import (
    CE_LOSS,
    DATA_WAIT_SHARE,
    GRAD_NORM,
    LR,
    MFU,
    TOKENS_PER_SECOND,
)
from olm_data.run_log.run_folder import (
    CONFIG,
    BadStep,
    Sample,
    StepSamples,
    bad_step_files,
    picked,
    read_samples,
)

MOST_EVENTS = 400
MOST_NAMED = 3
"""Documents that a line names."""
SILENT = 300.0
"""Seconds without a line after which a run is called silent."""
MOST_CHANGES = 3

_CHECKPOINT = re.compile(r"step([0-9]{1,18})")


class RunEvent(msgspec.Struct, frozen=True):
    """Something that happened after a step; `time` is 0 where it is not known."""

    kind: Literal["start", "end", "spike", "bad", "checkpoint"]
    step: int
    time: float
    text: str


class RunStatus(msgspec.Struct, frozen=True):
    """How a run is: a word, and more of it."""

    word: Literal["running", "silent", "finished", "stopped", "cancelled", "failed"]
    text: str


def status(starts: Sequence[Start], ends: Sequence[End], last: float, now: float) -> RunStatus:
    """Return how a run is.

    Args:
        last: when its last line was written.
        now: seconds since 1970.
    """
    started = starts[-1].time if starts else 0.0
    if ends and ends[-1].time >= started:
        return RunStatus(ends[-1].reason, _ended(ends[-1]))
    quiet = now - max(last, started)
    if quiet > SILENT:
        return RunStatus("silent", f"no line for {duration(quiet)}, and no word of an end")
    return RunStatus("running", "")


def events(
    folder: Path, starts: Sequence[Start], ends: Sequence[End], notes: list[str]
) -> tuple[list[RunEvent], int]:
    """Return the latest events of a run, by step, and how many earlier ones there are.

    Args:
        notes: takes a remark on each file that cannot be read.
    """
    found = [RunEvent("start", start.step, start.time, _started(start)) for start in starts]
    found += [RunEvent("end", end.step, end.time, _ended(end)) for end in ends]
    for path in folder.glob("step*"):
        name = _CHECKPOINT.fullmatch(path.name)
        with suppress(FileNotFoundError, NotADirectoryError):  # also: removed meanwhile
            if name:
                when = (path / "manifest.json").stat().st_mtime
                found.append(RunEvent("checkpoint", int(name[1]), round(when, 3), "checkpoint"))
    files = bad_step_files(folder)
    for step, kind, path in files[-MOST_EVENTS:]:
        try:
            text = _bad(path, path.stat().st_mtime_ns)
        except (OlmError, OSError) as error:
            notes.append(f"{path.name} cannot be read: {error}")
            text = "its file cannot be read"
        found.append(RunEvent("bad" if kind == "bad" else "spike", step, 0.0, text))
    found.sort(key=lambda event: (event.step, event.time))
    earlier = max(0, len(files) - MOST_EVENTS) + max(0, len(found) - MOST_EVENTS)
    return found[-MOST_EVENTS:], earlier


def _started(start: Start) -> str:
    parts = [f"start on {start.world_size:,} x {start.device or 'unknown device'}"]
    if start.step:
        parts.append(f"from step {start.step:,}")
    if start.rewound:
        parts.append(f"{start.rewound:,} steps lost")
    if start.bad:
        parts.append(f"leaving out {sum(b - a for a, b in start.bad):,} rows")
    parts += start.changes[:MOST_CHANGES]
    if len(start.changes) > MOST_CHANGES:
        parts.append(f"{len(start.changes) - MOST_CHANGES:,} more changes")
    return shown(", ".join(parts))


def _ended(end: End) -> str:
    by = f" by {end.by}" if end.by else ""
    return shown(f"{end.reason}{by} at step {end.step:,}" + (f": {end.why}" if end.why else ""))


@lru_cache(maxsize=2 * MOST_EVENTS)
def _bad(path: Path, changed: int) -> str:
    """Return a bad step in words. Args: changed: when its file was, so that a new one is read."""
    bad = BadStep.read(path)
    places = bad.places()
    more = f" and {len(places) - MOST_NAMED:,} more" if len(places) > MOST_NAMED else ""
    named = f"; {', '.join(places[:MOST_NAMED])}{more}" if places else ""
    return shown(f"loss {bad.loss[:24]}, gradient norm {bad.grad_norm[:24]}{named}")


MOST_SKIPPED = 1 << 20
"""Rows left out whose sources are looked up."""
MOST_SOURCES = 24


class DrawnShare(msgspec.Struct, frozen=True):
    """A source: tokens drawn so far, and the shares of the whole that were drawn and asked for."""

    source: str
    tokens: int
    drawn: float
    asked: float


def shares(lock: Lock, schedule: Schedule, rows: int, skipped: Sequence[Range]) -> list[DrawnShare]:
    """Return the shares of the sources drawn most, after the first `rows` rows of the run.

    Args:
        skipped: ranges of them that were left out, sorted and merged.
    """
    rows = min(rows, schedule.total_rows)
    drawn = schedule.drawn_before(rows).astype(np.int64)
    gone = [(a, min(b, rows)) for a, b in skipped if a < rows]
    if sum(b - a for a, b in gone) <= MOST_SKIPPED:
        for first, end in gone:
            places = schedule.locate(np.arange(first, end))
            drawn = drawn - np.bincount(places.source, minlength=len(drawn))
    asked, left = [Fraction(0)] * len(drawn), rows
    for stage in lock.stages:
        here = min(left, stage.rows)
        left -= here
        asked = [a + here * Fraction(w) for a, w in zip(asked, stage.wanted, strict=True)]
    total, wanted = max(1, int(drawn.sum())), sum(asked) or 1
    order = sorted(range(len(drawn)), key=lambda i: (-int(drawn[i]), i))[:MOST_SOURCES]
    return [
        DrawnShare(
            source=lock.sources[i].name,
            tokens=int(drawn[i]) * lock.sequence_length,
            drawn=int(drawn[i]) / total,
            asked=float(asked[i] / wanted),
        )
        for i in order
    ]


def total_steps(starts: Sequence[Start], lock: Lock) -> int:
    """Return how many steps the last start is to have, by its sizes and `max_duration`."""
    if not starts:
        return 0
    sizes = starts[-1].batch_sizes
    skipped = sum(stop - first for first, stop in starts[-1].skip)
    total = sizes.per(lock.sequence_length).count(lock.total_rows - skipped)
    trainer = starts[-1].config.get("trainer")
    limit = trainer.get("max_duration") if isinstance(trainer, dict) else None
    if isinstance(limit, dict) and isinstance(limit.get("value"), int):
        if limit.get("unit") == "steps":
            return min(total, int(limit["value"]))
        if limit.get("unit") == "tokens":
            return min(total, sizes.steps_to(int(limit["value"])))
    return total


DRAWN = (CE_LOSS, LR, GRAD_NORM, TOKENS_PER_SECOND, DATA_WAIT_SHARE, MFU)
MOST_ROWS = 200
"""Evaluations in a table."""
READ_SECONDS = 0.5
"""For which an update reads a log; what is left is read by the next."""
_TOKEN = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,18}){6}")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a page says of a run beside its curves; sent whole when any of it has changed.

    Attributes:
        facts: (name, value), first those to look at first.
        total: steps the run is to have; 0: not known.
        more_events: how many earlier ones there are.
        sets, tasks: the latest evaluation of each held-out set and downstream task.
        samples: texts written after some steps, see `picked`.
        command: that prints the documents of step STEP.
        started: the command of the last start.
        config: the options of the run by dotted name, each as JSON.
    """

    status: RunStatus
    facts: list[tuple[str, str]]
    step: int
    total: int
    events: list[RunEvent]
    more_events: int
    mixture: list[DrawnShare]
    sets: list[SetRow]
    tasks: list[TaskRow]
    sample: Sample | None
    samples: list[StepSamples]
    notes: list[str]
    command: str
    started: str
    config: dict[str, str]


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What a page has not yet of a run.

    Attributes:
        token: for the next question.
        reset: nothing that was sent before holds.
        evaluations: those after the ones that were sent.
        words: None where they have not changed.
        ledger: None where the run has none, or it has not changed.
        read: share of the log that was read, 0 to 1.
    """

    name: str
    token: str
    reset: bool
    points: Points
    evaluations: list[EvaluationPoint]
    words: RunSummary | None
    ledger: LedgerCurves | None
    read: float


class _Last(NamedTuple):
    """The last logged step: its number, the row after its last one, and tokens trained on."""

    step: int
    row: int
    tokens: int


class RunView:
    """A run as a page shows it; may be asked from several threads.

    Args:
        folder: of the run.
        name: it is shown by.
        lock: path of its mixture lock; None: what its configuration says.
        note: says what is to be told of the folder itself.

    Raises:
        InputError: it is not a folder of a run.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        lock: str | None = None,
        note: Callable[[], str] = str,
    ) -> None:
        if not any((folder / each).exists() for each in (METRICS, CONFIG)):
            raise InputError(
                f"this is not a run folder: it has no {METRICS} and no {CONFIG}",
                where=str(folder),
                fix=nearest(folder, "give the trainer.save_folder of a run, or its work_dir"),
            )
        self.folder, self.name = folder, name
        self._lock_path, self._note = lock, note
        self._mutex = Mutex()
        self._tail = LogTail(folder, DRAWN)
        self._ledger = LedgerTail(folder)
        self._rows: LockRows | None = None
        self._rows_of = ""
        self._begin()

    def _begin(self) -> None:
        self._curves, self._evaluations = Curves(DRAWN), list[EvaluationPoint]()
        self._standing, self._watched = EvaluationTable(), WatchedTail(self.folder)
        self._later = list[Evaluation]()  # of steps that the log does not have yet
        self._last: _Last | None = None
        self._last_time = 0.0
        self._skipped: list[Range] = []

    def update(self, token: str = "", first: int = 0, last: int = 1 << 62) -> Update:
        """Read what is new and return what is not yet known by a token.

        Args:
            first, last: steps whose curves are wanted.

        Raises:
            ValidationError: a file of the run is malformed.
        """
        with self._mutex:
            self._read(READ_SECONDS)
            known = [int(part) for part in token.split(".")] if _TOKEN.fullmatch(token) else [0] * 7
            generation, begin, size, have, evaluations, said, drawn = known
            indices = self._curves.between(first, last)
            reset = generation != self._tail.generation or begin != indices.start
            points = self._curves.points(indices, *((0, 0) if reset else (size, have)))
            words = self._words()
            digest = hash(msgspec.json.encode(words)) & ((1 << 59) - 1)
            count = points.first + len(points.steps)
            ledger = None if drawn == self._ledger.changes and not reset else self._ledger.curves()
            now = (
                *(self._tail.generation, indices.start, points.size, count),
                *(len(self._evaluations), digest, self._ledger.changes),
            )
            share = self._tail.read_share
            return Update(
                name=shown(self.name),
                token=".".join(map(str, now)),
                reset=reset,
                points=points,
                evaluations=self._evaluations[0 if reset else evaluations :],
                ledger=ledger,
                words=None if digest == said and not reset else words,
                read=min(0.999, share) if self._ledger.more else share,
            )

    def read_all(self) -> None:
        """Read all of the log that there is, however long that takes."""
        with self._mutex:
            self._read(float("inf"))

    def documents(self, step: int, *, most_rows: int = 64, most_text: int = 600) -> StepDocuments:
        """Return the documents of a step, or of the last logged one before it.

        Raises:
            InputError: there is no such step, or no lock.
            ValidationError: the step was made of other rows than those of the lock.
        """
        with self._mutex:
            place = self._curves.place(step)
            entry = None if place is None else self._tail.step_at(place)
            if entry is None:
                raise InputError(f"no step {step:,} is in the log")
            rows = self._lock_rows()
            if not self._lock_path:
                rows.lock.refuse_far(str(self.folder))
            return step_documents(
                rows, entry, most_rows=most_rows, most_text=most_text, ledger=self.folder
            )

    def frozen_steps(self, most: int) -> list[int]:
        """Return steps to look at: those of events and evaluations, then evenly spaced ones."""
        with self._mutex:
            count = len(self._curves)
            if not count:
                return []
            all_steps = self._curves.points(range(count)).steps
            marked = [e.step for e in self._words().events if e.kind in ("spike", "bad")]
            marked += [each.step for each in self._evaluations]
            chosen = {step for step in marked[: most // 2] if step > 0}
            free = max(1, most - len(chosen))
            spaced = {number * (len(all_steps) - 1) // max(1, free - 1) for number in range(free)}
            return sorted(chosen | {all_steps[index] for index in spaced})

    def _read(self, seconds: float) -> None:
        self._ledger.read(seconds)
        generation = self._tail.generation
        entries = self._tail.read(seconds)
        if self._tail.generation != generation:
            self._begin()
        for entry in entries:
            if isinstance(entry, Evaluation):
                self._last_time = max(self._last_time, entry.time)
                self._take(harmless(entry))
                continue
            self._last_time = max(self._last_time, float(entry.time.max()))
            begins, ends = entry.rows.T
            before = np.concatenate([[self._last.row if self._last else 0], ends[:-1]])
            for gap in np.flatnonzero(before < begins):
                self._skipped.append((int(before[gap]), int(begins[gap])))
            self._skipped += entry.skipped
            self._curves.extend(entry)
            self._last = _Last(int(entry.step[-1]), int(ends[-1]), int(entry.tokens[-1]))

        self._later += [each.logged for each in self._watched.read()]
        last = self._last.step if self._last else -1
        for evaluation in [each for each in self._later if each.step <= last]:
            self._take(harmless(evaluation))
        self._later = [each for each in self._later if each.step > last]

    def _take(self, entry: Evaluation) -> None:
        self._evaluations.append(point(entry))
        self._standing.take(entry)

    def _words(self) -> RunSummary:
        gone = "" if self.folder.is_dir() else f"{self.folder} is gone: this is what was read of it"
        said = (gone, self._note(), self._tail.wrong, self._ledger.wrong)
        notes = [text for text in said if text]
        notes += [f"eval/{name}: {why}" for name, why in self._watched.wrong.items()]
        starts, ends = read_starts(self.folder, notes), read_ends(self.folder, notes)
        mixture: list[DrawnShare] = []
        command, total = "", 0
        try:
            rows = self._lock_rows(starts)
            if self._last:
                mixture = shares(
                    rows.lock, rows.schedule, self._last.row, merge_ranges(self._skipped)
                )
            total = total_steps(starts, rows.lock)
            command = f"olm-data show step {self._rows_of} STEP --run {self.folder}"
        except OlmError as error:
            notes.append(f"mixture and documents are not shown: {error.what}")
        found, more = events(self.folder, starts, ends, notes)
        happened = status(starts, ends, self._last_time, time.time())
        sample = Sample.read(self.folder)
        summary = RunSummary(
            status=happened,
            facts=[(name, value) for name, value in self._facts(starts) if value],
            step=self._last.step if self._last else 0,
            total=total,
            events=found,
            more_events=more,
            mixture=mixture,
            sets=self._standing.sets()[:MOST_ROWS],
            tasks=self._standing.tasks()[:MOST_ROWS],
            sample=sample and msgspec.structs.replace(sample, ids=()),
            samples=picked(read_samples(self.folder, notes)),
            notes=notes,
            command=command,
            started=starts[-1].command if starts else "",
            config=dict(_options(self.folder)),
        )
        return harmless(summary)

    def _facts(self, starts: Sequence[Start]) -> list[tuple[str, str]]:
        loss, speed = self._curves.last(CE_LOSS, 20), self._curves.last(TOKENS_PER_SECOND, 5)
        wait, mfu = self._curves.last(DATA_WAIT_SHARE, 5), self._curves.last(MFU, 5)
        start = starts[-1] if starts else None
        return [
            ("loss, last 20 steps", "" if loss is None else f"{loss:.3f}"),
            *self._standing.facts(),
            ("tokens", scaled(self._last.tokens) if self._last else ""),
            ("tokens/s", "" if speed is None else f"{speed:,.0f}"),
            ("waiting for data", "" if wait is None else f"{100 * wait:.1f} %"),
            ("MFU", "" if mfu is None else f"{100 * mfu:.1f} %"),
            ("parameters", scaled(start.parameters) if start and start.parameters else ""),
            ("device", f"{start.world_size:,} x {start.device}" if start and start.device else ""),
            ("for", duration(max(0.0, self._last_time - starts[0].time)) if starts else ""),
        ]

    def _lock_rows(self, starts: Sequence[Start] | None = None) -> LockRows:
        """Return the rows of the lock that the last start took.

        Raises:
            InputError: it is not where the configuration says, or is another one.
        """
        starts = read_starts(self.folder) if starts is None else starts
        wanted = starts[-1].lock if starts else None
        rows = self._rows
        settled = rows is not None and rows.lock.complete  # that of arriving text may have grown
        if rows is not None and settled and wanted in (None, *rows.lock.digests(0)):
            return rows
        path = self._lock_path or lock_of_run(_config(self.folder), str(self.folder))
        lock = Lock.read(path)
        if wanted is not None and wanted not in lock.digests(0):
            raise InputError(f"the run was started with another lock than {path}: {wanted[:12]}")
        self._rows, self._rows_of = LockRows(lock), path
        return self._rows


def _config(folder: Path) -> JsonObject:
    try:
        return decode_object(read_regular(folder / CONFIG))
    except FileNotFoundError:
        raise InputError(f"there is no {CONFIG} that names the mixture lock") from None
    except MalformedJson as error:
        raise InputError(f"{CONFIG} cannot be read: {error}") from None


def _options(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the options of a run by dotted name, as JSON; none where there is no configuration."""
    left: list[tuple[str, object]] = []
    with suppress(InputError):
        left.append(("", _config(folder)))
    while left:
        name, value = left.pop()
        if isinstance(value, dict) and value:
            left += [(f"{name}.{key}" if name else key, part) for key, part in value.items()]
        elif value is not None:
            yield name, msgspec.json.encode(value).decode()


def open_views(
    folders: Sequence[Path],
    lock: str | None = None,
    notes: Mapping[Path, Callable[[], str]] | None = None,
) -> list[RunView]:
    """Return views of run folders, named by folder, or by path where folders have one name.

    Args:
        notes: what is to be told of some folders.

    Raises:
        InputError: one is not a folder of a run.
    """
    names = [folder.resolve().name for folder in folders]
    return [
        RunView(
            folder,
            name if names.count(name) == 1 else str(folder),
            lock,
            (notes or {}).get(folder, str),
        )
        for folder, name in zip(folders, names, strict=True)
    ]


def encoded(value: object) -> str:
    """Return JSON that may stand in a page: no character of it ends or begins a tag."""
    text = msgspec.json.encode(value).decode()
    unsafe: dict[str, str | int | None] = {c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
    return text.translate(str.maketrans(unsafe))
