"""The thread of one tracker: it reads the log and feeds it; what the tracker does stays in there.

    training thread: wake, close --> open -> truncate -> read -> log -> close
                                      ^------ pause <--- any error ---'

No metrics wait in memory: they lie in the log, so a tracker that falls behind loses nothing. How
far each has come is in `tracking.json` of the run's folder, which is read and written here only:

    {"version": 1, "trackers": {"wandb": {"key": "x1y2z3", "step": 120, "lines": 2}}}
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.errors import ConflictError, printable
from olm_data.extensions.watching.follow import LoggedStep, StepReader, last_step, lines_of_step
from olm_data.extensions.watching.watched import EVAL, WatchedEvaluation, WatchedTail
from olm_data.redaction import redacted
from olm_data.regular_files import read_regular
from olm_data.run_log.lines import malformed_log, replace_file
from olm_data.run_log.metric_names import WATCHED_STEP, of_watched
from olm_data.storage.disk import locked
from olm_data.storage.store import Store
from olm_train.extensions.tracking.base import Ending, Tracker

T = TypeVar("T")

TRACKING = "tracking.json"

_writing = threading.Lock()
"""The trackers of a run have a thread each, and this one file."""

BATCH = 1000
"""Steps that are handed over at a time; then it is written down how far that is."""
REMOTE_SECONDS = 30.0
"""Between two looks at what watchers left in a remote save folder."""
INTERVAL = 0.5
"""Seconds between two looks at the log."""
PATIENCE = 30.0
"""Seconds that a call may take before it is said that it hangs; the end of the run waits as long
for everything, and no longer."""
LONGEST_PAUSE = 60.0
LONGEST_ERROR = 400


class TrackerCursor(msgspec.Struct, frozen=True):
    """An evaluation made beside the run that a tracker has.

    Attributes:
        time: of the file it was read from.
        at: the step that it lies at; it goes with later ones.
    """

    time: float
    at: Size


class TrackerState(msgspec.Struct, frozen=True, kw_only=True):
    """A run on a tracker.

    Attributes:
        key: what the tracker calls it.
        step: the last step that it has taken.
        lines: lines of the log that it has of that step; a late evaluation adds one.
        keep: the run went back to this step, and the later ones of the tracker are still to be
            removed; None: nothing is.
        watched: evaluations made beside the run that it has, by file name.
    """

    key: str
    step: Size = 0
    lines: Size = 0
    keep: Size | None = None
    watched: dict[str, TrackerCursor] = {}  # msgspec gives each its own


class _File(msgspec.Struct, frozen=True, kw_only=True):
    trackers: dict[str, TrackerState] = {}
    version: Literal[1] = 1


class Feeder:
    """Feeds a tracker from the log of a run.

    Args:
        tracker: used by one thread only.
        folder: of the log.
        step: the last step whose weights are those of the run; the tracker's later ones go.
        key: of the run on the tracker, where `tracking.json` does not say it.
        say: takes a line for the user.
        cancel: is told why somebody on the tracker wants the run to end.
        cancel_interval: steps after which the tracker is asked, None: never.
        patience: seconds that a call may take before it is said that it hangs, and that `close`
            waits for everything.
        save_folder: of the run, where it is another one: evaluations made beside the run are there.

    Attributes:
        tracked: what the tracker surely has; None before it was opened for the first time.
    """

    def __init__(
        self,
        tracker: Tracker,
        folder: Path,
        *,
        step: int,
        key: str | None = None,
        say: Callable[[str], None],
        cancel: Callable[[str], None] = lambda why: None,
        cancel_interval: int | None = None,
        patience: float = PATIENCE,
        save_folder: str | None = None,
    ) -> None:
        self._tracker, self._folder, self._say, self._cancel = tracker, folder, say, cancel
        self._patience, self._cancel_interval = patience, cancel_interval
        self._begin = (step, lines_of_step(folder, step))
        self._key, self._lock = key, folder / f"tracking.{tracker.name}.lock"
        self._done = self._abandoned = False
        self.tracked: TrackerState | None = read_tracked(folder, tracker.name)
        if self.tracked is not None:
            keep = step if self.tracked.keep is None else min(step, self.tracked.keep)
            self._write(replace(self.tracked, keep=keep))
        self._reader: StepReader | None = None  # None: the tracker is not open
        self._place = Store(save_folder or str(folder))
        self._asked = step  # step at which the tracker was asked whether to cancel
        self._told: set[str] = set()
        self._doing: tuple[str, float] | None = None  # call, since when
        self._ending: Ending | None = None
        self._failure: tuple[str, str] | None = None
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"olm-track-{tracker.name}", daemon=True
        )

    # ---- the training thread -------------------------------------------------------------------

    def start(self) -> None:
        """Begin, in the thread."""
        self._thread.start()

    def wake(self) -> None:
        """The log has grown; tell the user if the tracker hangs."""
        self._wake.set()
        if (doing := self._doing) is not None and time.monotonic() - doing[1] > self._patience:
            self._tell(doing[0], f"{doing[0]} takes longer than {self._patience:g} seconds")

    def close(self, ending: Ending, failure: tuple[str, str] | None = None) -> None:
        """The log is complete: wait until the tracker has it, or its time is up.

        Args:
            failure: title and text for who watches the run on the tracker.
        """
        self._failure = None if failure is None else (redacted(failure[0]), redacted(failure[1]))
        self._ending = ending
        self._ended.set()
        self._wake.set()
        self._thread.join(self._patience)
        self._abandoned = True
        if not self._done:
            have, last = self.tracked.step if self.tracked else 0, last_step(self._folder)
            self._say(
                f"note: {self._tracker.name} has surely taken {have:,} of {last:,} steps\n"
                f"  bring the rest: olm-train track {self._folder} --to {self._tracker.name}"
            )

    # ---- without a thread ----------------------------------------------------------------------

    def replay(self) -> int:
        """Feed all that is missing of a complete log, in this thread; return the steps fed.

        Raises:
            ConflictError: another process feeds this tracker from this folder.
            Exception: whatever the tracker raises.
        """
        with locked(self._lock, wait=False) as handle:
            if handle is None:
                raise ConflictError(
                    f"another process feeds {self._tracker.name} from this run",
                    where=str(self._folder),
                    fix="wait until it has ended; a run that goes on feeds its trackers itself",
                )
            self._ending = "finished"
            fed = self._feed()
            self._call("close", self._tracker.close, self._ending)
            return fed

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        with locked(self._lock):
            pause = 0.0
            while not self._abandoned:
                ending = self._ending
                try:
                    self._feed()
                    pause = 0.0
                    if ending is not None:
                        if self._failure is not None:
                            self._call("alert", self._tracker.alert, *self._failure, "error")
                        self._call("close", self._tracker.close, ending)
                        self._done = True
                except Exception as error:
                    self._reader, pause = None, min(LONGEST_PAUSE, max(1.0, 2 * pause))
                    self._tell(type(error).__name__, f"{type(error).__name__}: {error}")
                if ending is not None:
                    return
                self._ended.wait(max(pause, INTERVAL))
                if not pause:
                    self._wake.wait()
                self._wake.clear()

    def _feed(self) -> int:
        """Hand over what the log has; return how many steps."""
        reader, fed = self._reader or self._open(), 0
        steps = reader.read(complete=self._ending is not None)
        while batch := list(islice(steps, BATCH)):
            self._call("log", self._tracker.log, batch)
            fed += len(batch)
            self._take(batch[-1])
        self._feed_late()
        return fed

    def _feed_late(self) -> None:
        """Hand over evaluations made beside the run, of steps that the tracker has.

        A tracker that takes rows in their order alone gets them behind the last one, each with its
        own step as the metric `watched/step`, once the run has finished.
        """
        assert self.tracked is not None
        for found in self._tail.read(now=self._ending is not None):
            fed = self.tracked.watched.get(found.file)
            if fed is None or fed.time != found.time:
                self._late[found.file] = found
        for name, why in self._tail.wrong.items():
            self._tell(name, f"{EVAL}/{name}: {why}")
        last, watched = self.tracked.step, dict(self.tracked.watched)
        known = [each for each in self._late.values() if each.step <= last]
        behind = not self._tracker.any_order
        if not known or (behind and self._ending != "finished"):
            return
        rows = [_logged(each) for each in known]
        for number, row in enumerate(rows if behind else (), 1):
            row.metrics[WATCHED_STEP] = row.step
            row.step = last + number
        self._call("log", self._tracker.log, rows)
        for each, row in zip(known, rows, strict=True):
            at = last if self._tracker.by_arrival else row.step
            watched[each.file] = TrackerCursor(self._late.pop(each.file).time, at)
        self._write(replace(self.tracked, watched=watched))

    def _open(self) -> StepReader:
        """Open the tracker where the run is; return what reads on from there."""
        tracker, tracked = self._tracker, self.tracked
        key, logged = (tracked.key, tracked.step) if tracked else (self._key, 0)
        key = self._call("open", tracker.open, key, logged)
        keep = tracked.keep if tracked else self._begin[0]
        bound = last_step(self._folder) if keep is None else keep
        there = self._call("open", tracker.truncate, bound)
        known = dict([self._begin, *([(tracked.step, tracked.lines)] if tracked else [])])
        lines = known[there] if there in known else lines_of_step(self._folder, there)
        watched = tracked.watched if tracked and there else {}
        watched = {name: fed for name, fed in watched.items() if fed.at <= there}
        self._write(TrackerState(key=key, step=there, lines=lines, watched=watched))
        seconds = REMOTE_SECONDS if self._place.remote else INTERVAL
        self._tail = WatchedTail(self._place, seconds)
        self._late: dict[str, WatchedEvaluation] = {}  # by file name, not fed yet
        beyond = there > bound
        if beyond and "kept" not in self._told:
            self._told.add("kept")
            self._say(
                f"note: {tracker.name} keeps {there - bound:,} steps after step {bound:,}, as it "
                "cannot remove them\n  what the run logs at these is in metrics.jsonl alone"
            )
        self._reader = StepReader(self._folder, there + beyond, 0 if beyond else lines)
        return self._reader

    def _take(self, last: LoggedStep) -> None:
        assert self.tracked is not None
        self._write(replace(self.tracked, step=last.step, lines=last.lines))
        every = self._cancel_interval
        if every is not None and last.step - self._asked >= every:
            self._asked = last.step
            if why := self._call("cancel check", self._tracker.cancelled):
                self._cancel(why)

    def _write(self, tracked: TrackerState) -> None:
        if not self._abandoned:
            self.tracked = tracked
            write_tracked(self._folder, self._tracker.name, tracked)

    def _call(self, what: str, function: Callable[..., T], *arguments: object) -> T:
        self._doing = (what, time.monotonic())
        try:
            return function(*arguments)
        finally:
            self._doing = None

    def _tell(self, kind: str, text: str) -> None:
        """Say something about the tracker, once of a kind."""
        if kind not in self._told and not self._abandoned:
            self._told.add(kind)
            self._say(
                f"warning: {self._tracker.name}: {printable(redacted(text))[:LONGEST_ERROR]}\n"
                "  training goes on, and what is missing there is read from the log later"
            )


def read_tracked(folder: Path, tracker: str) -> TrackerState | None:
    """Read what a tracker has of the run in a folder; None: nothing.

    Raises:
        ValidationError: the file is malformed.
    """
    return _read(folder).trackers.get(tracker)


def write_tracked(folder: Path, tracker: str, tracked: TrackerState) -> None:
    """Write it, durably.

    Raises:
        OSError: the disk refuses.
    """
    with _writing:
        trackers = {**_read(folder).trackers, tracker: tracked}
        plain = msgspec.to_builtins(_File(trackers=trackers))
        replace_file(folder / TRACKING, json.dumps(plain, indent=1).encode() + b"\n")


def _read(folder: Path) -> _File:
    path = folder / TRACKING
    try:
        return decode(read_regular(path), _File)
    except FileNotFoundError:
        return _File()
    except MalformedJson as error:
        raise malformed_log(path, str(error)) from None


def is_behind(folder: Path, tracker: str) -> bool:
    """Whether a log has steps that a tracker does not surely have."""
    last, tracked = last_step(folder), read_tracked(folder, tracker)
    if tracked is None or tracked.keep is not None:
        return last > 0
    return (tracked.step, tracked.lines) < (last, lines_of_step(folder, last))


def _logged(found: WatchedEvaluation) -> LoggedStep:
    """Return an evaluation as a row, NaN where its file has null."""
    return LoggedStep(
        step=found.step,
        time=found.time,
        metrics={
            of_watched(name, metric): math.nan if value is None else value
            for name, values in found.logged.results.items()
            for metric, value in values.items()
        },
    )
