"""Heartbeats: what each process of a run is doing, in the output's `run/` folder, for people.

    parent, workers --(every 10 s)--> run/<name>.json --> `olm-data status`, other parents

A heartbeat is a hint. Whether a task is done is told by its commit record alone, so a heartbeat
that is lost, late or wrong about the time changes no byte of the dataset. The parent removes the
folder when all tasks are done.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from olm_data import errors
from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.counts import spell_ranges
from olm_data.dataset.plan import parse_tasks
from olm_data.errors import OlmError, UsageError, ValidationError
from olm_data.redaction import redacted
from olm_data.runners.base import Count, Note
from olm_data.storage.lease import LeaseLostError
from olm_data.storage.store import Store, read_json
from olm_data.threads import in_order

RUN = "run"
PARENT = "parent"
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
"""A process that should run and has not been heard of for so long is taken for dead."""


_Counts = Annotated[list[Size], msgspec.Meta(min_length=len(Count), max_length=len(Count))]
_State = Literal["running", "done", "failed", "interrupted"]
_Task = Annotated[int, msgspec.Meta(ge=0, lt=10**7)]


class StoredError(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An error in a heartbeat: its kind among `olm_data.errors`, "" for others, and its parts."""

    kind: str
    what: str
    where: str | None = None
    why: str | None = None
    fix: str | None = None

    @classmethod
    def of(cls, error: Exception) -> StoredError:
        """Return what is stored of an error."""
        if not isinstance(error, OlmError):
            return cls("", redacted(f"{type(error).__name__}: {error}"))
        public = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return cls(public.__name__, error.what, error.where, error.why, error.fix)

    def restored(self) -> Exception:
        """Return an error with the same message and exit code."""
        kind = getattr(errors, self.kind, None) if self.kind else None
        if isinstance(kind, type) and issubclass(kind, OlmError):
            return kind(self.what, where=self.where, why=self.why, fix=self.fix)
        return RuntimeError(self.what)


class Beat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="format",
    tag="olm-heartbeat",
):
    """One heartbeat: the content of its file, but for `name`.

    Attributes:
        host, pid: where its process runs.
        started, time: wall clock seconds since 1970, by its own clock.
        state: running, done, failed or interrupted.
        done: ranges of the tasks it has done, as `spell_ranges` spells them.
        running: task -> its counts so far, one for each `Count`.
        counts: sums over all its tasks, the running ones included.
        error: what ended it, if an error did.
        name: of the worker, as its file is called; `parent` is the command itself.
    """

    version: Literal[1]
    host: str
    pid: Size
    started: float
    time: float
    state: _State
    done: str
    running: dict[_Task, _Counts]
    counts: _Counts
    error: StoredError | None
    name: str = ""

    def tasks_done(self) -> list[int]:
        """Return the tasks it has done, ascending.

        Raises:
            UsageError: `done` spells none.
        """
        return parse_tasks(self.done) if self.done else []

    def age(self, now: float) -> float:
        """Seconds since it was written, by the clocks of writer and reader."""
        return max(0.0, now - self.time)

    def alive(self, now: float) -> bool:
        """Whether its process is likely at work."""
        return self.state == "running" and self.age(now) < STALE_SECONDS


class Heartbeat:
    """Writes the heartbeat of this process while its body runs.

    Args:
        output: the dataset's store.
        name: of the file in `run/`; two live processes must not share one.
        note: where to say, once, that heartbeats cannot be written.
        check: asked before each; nothing is written where it raises `LeaseLostError`.
    """

    def __init__(
        self, output: Store, name: str, *, note: Note, check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        self._store, self._name, self._note = output.child(RUN), name, note
        self._started = time.time()
        self._counts = np.zeros((0, len(Count)), np.int64)
        self._running: dict[int, np.ndarray] = {}
        self._past = np.zeros(len(Count), np.int64)
        self._done: set[int] = set()
        self._due = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, args=(self._stop,), daemon=True)
        self._failed = False

    def __enter__(self) -> Heartbeat:
        self._put("running")  # an output that cannot be written is refused before work
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            if self._name != PARENT:  # which now removes the whole folder
                self._write("done")
        elif isinstance(error, Exception):
            self._write("failed", StoredError.of(error))
        else:
            self._write("interrupted")

    def saw_done(self, task: int, result: object = None) -> None:
        """Note that a task is done; for `Runner.run`, whatever came of it."""
        self._done.add(task)

    def saw(self, counts: np.ndarray, running: Sequence[int]) -> None:
        """Note the counts (kept by reference, int64[tasks, len(Count)]) and the running tasks."""
        self._counts, self._running = counts, {task: counts[task] for task in running}

    @contextmanager
    def during(self, task: int, row: np.ndarray) -> Iterator[None]:
        """Tell of a task, with its counts int64 [len(Count)], while the body runs.

        For a process that gets its tasks one by one and does not know its last: instead of the
        heartbeat's own block. Between tasks nothing is written.
        """
        self._counts, self._running = row[None, :], {task: row}
        stop = threading.Event()
        thread = threading.Thread(target=self._beat_on, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._past = summed(np.stack([self._past, row]))
            self._counts, self._running = self._counts[:0], {}
        self._done.add(task)

    def _beat_on(self, stop: threading.Event) -> None:
        while not stop.wait(max(0.0, self._due - time.monotonic())):
            self._write("running")

    def _write(self, state: _State, error: StoredError | None = None) -> None:
        try:
            self._put(state, error)
        except LeaseLostError:  # the folder is another command's now
            return
        except OlmError as failure:  # work goes on without; a store that is down stops the work
            if not self._failed:
                self._note(f"cannot write heartbeats, `olm-data status` will not know: {failure}")
            self._failed = True

    def _put(self, state: _State, error: StoredError | None = None) -> None:
        self._due = time.monotonic() + BEAT_SECONDS
        self._check()
        beat = Beat(
            version=1,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self._started,
            time=time.time(),
            state=state,
            done=spell_ranges(sorted(self._done.copy())),
            running={task: row.tolist() for task, row in self._running.items()},
            counts=summed(np.vstack([self._past, self._counts])).tolist(),
            error=error,
        )
        self._store.put(f"{self._name}.json", msgspec.json.encode(beat))


def summed(counts: np.ndarray) -> np.ndarray:
    """Return int64 [len(Count)]: the sums of the rows of `counts`; of memory, the largest."""
    if len(counts) == 0:
        return np.zeros(len(Count), np.int64)
    sums: np.ndarray = counts.sum(axis=0)
    sums[Count.PEAK_KIB] = counts[:, Count.PEAK_KIB].max()
    return sums


def read_beats(output: Store, prefix: str = "", skip: Collection[str] = ()) -> list[Beat]:
    """Return the heartbeats whose names start with `prefix`, by name; damaged ones are left out.

    Args:
        skip: names not to read.

    Costs a listing of `run/` and a read of each heartbeat, 16 at a time.
    """
    store = output.child(RUN)
    names = [name for name in store.sizes(prefix) if name.endswith(".json")]
    names = sorted(name for name in names if name.removesuffix(".json") not in skip)
    found = in_order(lambda name: _read_beat(store, name), names)
    return [beat for beat in found if beat is not None]


def _read_beat(store: Store, name: str) -> Beat | None:
    try:
        beat = decode(read_json(store, name), Beat)
        beat.tasks_done()
        return msgspec.structs.replace(beat, name=name.removesuffix(".json"))
    except (FileNotFoundError, MalformedJson, UsageError, ValidationError):
        return None  # replaced or removed meanwhile, or no heartbeat: only a hint is missing


def forget_ended(output: Store) -> None:
    """Remove heartbeats of processes that ended or were not heard of for long."""
    now = time.time()
    for beat in read_beats(output):
        if not beat.alive(now):
            output.child(RUN).delete(f"{beat.name}.json")
