"""The thread of one tracker: it reads the log and feeds it; what the tracker does stays in there.

    training thread: wake, alert --(bounded queue)--> open -> truncate -> read -> log -> close
                                                       ^------ pause <--- any error ---'

No metrics wait in memory: they lie in the log, so a tracker that falls behind loses nothing. How
far each has come is in `tracking.json` of the run's folder, which is read and written here only:

    {"version": 1, "trackers": {"wandb": {"key": "x1y2z3", "step": 120, "lines": 2}}}
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.errors import ConflictError, printable
from olm_data.extensions.watching.follow import LoggedStep, StepReader, last_step, lines_of_step
from olm_data.extensions.watching.watched import EVAL, WatchedEvaluation, WatchedTail
from olm_data.redaction import redacted
from olm_data.regular_files import read_regular
from olm_data.run_log.lines import malformed_log, replace_file
from olm_data.run_log.metric_names import of_watched
from olm_data.storage.disk import locked
from olm_data.storage.store import Store
from olm_train.extensions.tracking.base import Ending, Level, RowsLost, Tracker

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
LONGEST_PAUSE = 60.0
MOST_ALERTS = 64
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds that a call of a tracker may take before it is said that it hangs.

    Attributes:
        open, log: training never waits for them.
        close: the end of the run waits for everything, but not longer than this.
    """

    open: float = 30.0
    log: float = 10.0
    close: float = 30.0


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
        limits: see there.
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
        limits: Limits | None = None,
        save_folder: str | None = None,
    ) -> None:
        self._tracker, self._folder, self._say, self._cancel = tracker, folder, say, cancel
        self._limits, self._cancel_interval = limits or Limits(), cancel_interval
        self._begin = (step, lines_of_step(folder, step))
        self._key, self._lock = key, folder / f"tracking.{tracker.name}.lock"
        self._done = self._abandoned = False
        self.tracked: TrackerState | None = read_tracked(folder, tracker.name)
        if self.tracked is not None:
            keep = step if self.tracked.keep is None else min(step, self.tracked.keep)
            self._write(msgspec.structs.replace(self.tracked, keep=keep))
        self._reader: StepReader | None = None  # None: the tracker is not open
        self._place = Store(save_folder or str(folder))
        self._watched = self._tail()
        self._earlier: dict[str, WatchedEvaluation] = {}  # by file name, not fed yet
        self._asked = step  # step at which the tracker was asked whether to cancel
        self._told: set[str] = set()
        self._doing: tuple[str, float, float] | None = None  # call, its limit, since when
        self._ending: Ending | None = None
        self._wake, self._ended = threading.Event(), threading.Event()
        self._alerts: queue.Queue[tuple[str, str, Level]] = queue.Queue(MOST_ALERTS)
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
        if (doing := self._doing) is not None and time.monotonic() - doing[2] > doing[1]:
            self._tell(doing[0], f"{doing[0]} takes longer than {doing[1]:g} seconds")

    def alert(self, title: str, text: str, level: Level) -> None:
        """Tell who watches the run on the tracker, if it can be reached."""
        try:
            self._alerts.put_nowait((redacted(title), redacted(text), level))
        except queue.Full:
            self._tell("alerts", f"too many alerts wait, left out: {title}")
        self._wake.set()

    def close(self, ending: Ending) -> None:
        """The log is complete: wait until the tracker has it, or its time is up."""
        self._ending = ending
        self._ended.set()
        self._wake.set()
        self._thread.join(self._limits.close)
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
            try:
                self._tracker.close(self._ending)
            except RowsLost as error:
                self._take_back(error.step)
                raise
            return fed

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        with locked(self._lock):
            pause, again = 0.0, True
            while not self._abandoned:
                ending = self._ending
                try:
                    self._feed()
                    self._send_alerts()
                    pause = 0.0
                    if ending is not None:
                        self._call("close", self._limits.close, self._tracker.close, ending)
                        self._done = True
                        return
                except Exception as error:
                    self._reader, pause = None, min(LONGEST_PAUSE, max(1.0, 2 * pause))
                    self._tell(type(error).__name__, f"{type(error).__name__}: {error}")
                    if isinstance(error, RowsLost):
                        self._take_back(error.step)
                        if again and ending is not None:
                            again = False
                            continue
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
            self._call("log", self._limits.log, self._tracker.log, batch)
            fed += len(batch)
            self._take(batch[-1])
        self._feed_earlier()
        return fed

    def _feed_earlier(self) -> None:
        """Hand over evaluations made beside the run, of steps that the tracker has."""
        assert self.tracked is not None
        for found in self._watched.read(now=self._ending is not None):
            fed = self.tracked.watched.get(found.file)
            if fed is None or fed.time != found.time:
                self._earlier[found.file] = found
        for name, why in self._watched.wrong.items():
            self._tell(name, f"{EVAL}/{name}: {why}")
        known = [each for each in self._earlier.values() if each.step <= self.tracked.step]
        if not known:
            return
        log, rows = self._tracker.log_earlier, [_logged(each) for each in known]
        complete = self._ending == "finished"  # no row of the log comes any more
        at = self._call("log", self._limits.log, log, rows, self.tracked.step, complete)
        watched = dict(self.tracked.watched)
        for each, step in zip(known, at, strict=False):
            watched[each.file] = TrackerCursor(self._earlier.pop(each.file).time, step)
        self._write(msgspec.structs.replace(self.tracked, watched=watched))

    def _open(self) -> StepReader:
        """Connect, remove what lies beyond the run, and find where to go on."""
        tracker, limit, tracked = self._tracker, self._limits.open, self.tracked
        key, logged = (tracked.key, tracked.step) if tracked else (self._key, 0)
        key = self._call("open", limit, tracker.open, key, logged)
        keep = tracked.keep if tracked else self._begin[0]
        bound = last_step(self._folder) if keep is None else keep
        there = self._call("open", limit, tracker.truncate, bound)
        if tracked is not None and there == tracked.step:
            lines = tracked.lines
        elif there == self._begin[0]:
            lines = self._begin[1]
        else:
            lines = lines_of_step(self._folder, there)
        watched = tracked.watched if tracked else {}
        watched = {name: fed for name, fed in watched.items() if fed.at <= there}
        self._write(TrackerState(key=key, step=there, lines=lines, watched=watched))
        self._watched, self._earlier = self._tail(), {}
        self._reader = StepReader(self._folder, there, lines) if there <= bound else None
        self._reader = self._reader or StepReader(self._folder, there + 1)
        return self._reader

    def _take(self, last: LoggedStep) -> None:
        assert self.tracked is not None
        self._write(msgspec.structs.replace(self.tracked, step=last.step, lines=last.lines))
        every = self._cancel_interval
        if every is not None and last.step - self._asked >= every:
            self._asked = last.step
            if why := self._call("cancel check", self._limits.log, self._tracker.cancelled):
                self._cancel(why)

    def _take_back(self, step: int) -> None:
        """Know that the tracker lacks what comes after a step."""
        if self.tracked is not None and step < self.tracked.step:
            lines = lines_of_step(self._folder, step)
            self._write(msgspec.structs.replace(self.tracked, step=step, lines=lines))

    def _tail(self) -> WatchedTail:
        return WatchedTail(self._place, REMOTE_SECONDS if self._place.remote else INTERVAL)

    def _send_alerts(self) -> None:
        while not self._alerts.empty():
            self._call("alert", self._limits.log, self._tracker.alert, *self._alerts.get())

    def _write(self, tracked: TrackerState) -> None:
        if not self._abandoned:
            self.tracked = tracked
            write_tracked(self._folder, self._tracker.name, tracked)

    def _call(self, what: str, limit: float, function: Callable[..., T], *arguments: object) -> T:
        self._doing = (what, limit, time.monotonic())
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
