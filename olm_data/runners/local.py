"""Run tasks in processes of this machine, one task a process at a time.

    parent --(task number)--> worker        by a pipe of its own for each worker
    parent <--(task, result | error)-- worker
    parent <--(task, None)-- worker         it waits for the disk only: the next one may come
    parent <--(counts)-- worker             by shared memory without a lock, a row for each task

So a worker has a task that it works on and at most one more that waits for the disk. A worker may
die at any moment (the kernel's out-of-memory killer, a crash in native code): the parent sees which
tasks it had, starts a new worker and gives them out again, at most `RETRIES` times. When the parent
dies, even by SIGKILL, its workers end at once. Workers may be started before it is sure that there
is work for them: forked from the parent once it has loaded what they need, or, as no process with
threads is ever forked, from a fork server (`fork_server.py`), to load it meanwhile.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import resource
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from olm_data.runners.base import (
    Count,
    Deferred,
    Done,
    Job,
    Note,
    Outcome,
    Runner,
    Watch,
    after_death,
    attempt,
    result_of,
    whole,
)
from olm_data.runners.fork_server import one_thread, own_sockets, take_environment
from olm_data.sinks import guard
from olm_data.threads import cgroup_quota

TICK_SECONDS = 0.25
"""How often the parent looks at the counts while it waits for results."""


class LocalRunner(Runner):
    """Runs the tasks in worker processes.

    Args:
        workers: number of processes.
        fork: those that are got ready come from this process, if it has one thread then.
    """

    def __init__(self, workers: int, *, fork: bool = False) -> None:
        self.workers, self._fork = workers, fork
        self._crew: _Crew | None = None

    def planned(self, tasks: int) -> str:
        """Return where `tasks` would run, in words."""
        return f"local: {min(self.workers, max(tasks, 1)):,} of {self.workers:,} processes at work"

    @contextmanager
    def ready(self, job: Job, workers: int, total: int) -> Iterator[None]:
        """See `base.Runner.ready`."""
        self._crew = _Crew(job, total)
        try:
            self._crew.start(min(workers, self.workers), fork=self._fork)
            yield
        finally:
            self._dismiss()

    def run(
        self, job: Job, tasks: Sequence[int], total: int, *, done: Done, watch: Watch, note: Note
    ) -> None:
        """See `base.Runner.run`."""
        if self._crew is None or (self._crew.job, self._crew.total) != (job, total):
            self._dismiss()
            self._crew = _Crew(job, total)
        pool = _Pool(self._crew, tasks, note)
        try:
            while pool.todo or pool.workers:
                pool.fill(self.workers)
                ready = set(wait([w.pipe for w in pool.workers], timeout=TICK_SECONDS))
                for worker in [w for w in pool.workers if w.pipe in ready]:
                    pool.hear(worker, done)
                watch(self._crew.counts, [task for w in pool.workers for task in w.tasks])
        finally:
            for worker in pool.workers:
                worker.kill()
            self._dismiss()

    def _dismiss(self) -> None:
        """End the workers that were got ready and have no task."""
        crew, self._crew = self._crew, None
        while crew is not None and crew.idle:
            crew.idle.pop().kill()


def _reason(code: int | None) -> dict[str, str]:
    """Return `why` and `fix` for the end of a worker, no more than its exit code tells."""
    kept = "; finished shards are kept"
    if code == -signal.SIGKILL:
        why = "SIGKILL from outside is usually the kernel ending a process for want of memory"
        fix = "run again with fewer --workers, or on a machine with more memory"
    elif code is not None and code < 0:
        why = "a signal ended it: a crash in native code, or somebody sent it"
        fix = "run it again; if it dies on the same input, take that input out and report it"
    else:
        why = "it ended by itself; what it said is above"
        fix = (
            "correct what is named there; a script of yours that calls olm_data starts its work "
            "below `if __name__ == '__main__':`"
        )
    return {"why": why, "fix": fix + kept}


class _Crew:
    """The workers of one job: what they share, and those that wait for their first task."""

    def __init__(self, job: Job, total: int) -> None:
        self.job, self.total = job, total
        self.idle: list[_Worker] = []
        own_sockets()
        self._shared = multiprocessing.RawArray(ctypes.c_int64, total * len(Count))
        shape = total, len(Count)
        self.counts = np.frombuffer(memoryview(self._shared), np.int64).reshape(shape)

    def start(self, workers: int, *, fork: bool = False) -> None:
        if fork := fork and one_thread():
            self.job.prepare()  # once, for all of them
            fork = one_thread()
        for _ in range(workers):
            others = [worker.pipe for worker in self.idle] if fork else None
            self.idle.append(_Worker(self.job, self._shared, others))

    def take(self) -> _Worker:
        """Return a worker that waits, or a new one."""
        if not self.idle:
            self.start(1)
        return self.idle.pop()


class _Pool:
    """The workers of a crew that have tasks, and the tasks that none has.

    Attributes:
        todo: those tasks, the next one first.
        workers: at work.
    """

    def __init__(self, crew: _Crew, tasks: Sequence[int], note: Note) -> None:
        self._crew, self._note = crew, note
        self.todo, self.workers = deque(tasks), list[_Worker]()
        self._deaths = Counter[int]()

    def fill(self, most: int) -> None:
        """Let so many workers have a task, where there are tasks."""
        while self.todo and len(self.workers) < most:
            self.workers.append(self._crew.take())
            self.workers[-1].give(self.todo.popleft())

    def hear(self, worker: _Worker, done: Done) -> None:
        """Take what a worker says, or its death; give it more to do, or let it go.

        Raises:
            ResourceError: it died, as others before it, on the same task.
        """
        try:
            said = worker.take()
        except (EOFError, ConnectionError):  # the worker's end closed: it died
            self._after_death(worker)
            return
        if said is not None:
            done(*said)
        # a task that killed a worker is tried alone: it may not take another one with it
        alone = bool(self.todo) and self.todo[0] in self._deaths
        if worker.idle and self.todo and not (alone and worker.tasks):
            worker.give(self.todo.popleft())
        elif not worker.tasks:
            self.workers.remove(worker)
            worker.stop()

    def _after_death(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        task, counts = worker.tasks[-1], self._crew.counts  # others only waited for the disk
        counts[worker.tasks, : Count.PEAK_KIB] = 0
        self._deaths[task] += 1
        how, where = worker.epitaph(), self._crew.job.describe(task)
        if peak_kib := counts[task, Count.PEAK_KIB]:
            how += f", peak memory {peak_kib / 2**20:.2f} GiB"
        reason = _reason(worker.process.exitcode)
        after_death("a worker", how, where, self._deaths[task], self._note, **reason)
        self.todo.extendleft(reversed(worker.tasks))


class _Worker:
    """One worker process, as its parent sees it.

    Args:
        inherited: where it is forked from this process: the pipes of the workers there are. Open
            in a second process, they would not end with this one's.

    Attributes:
        tasks: that it was given and that are not done, the one it works on last.
        idle: whether it works on none of them.
    """

    def __init__(self, job: Job, shared: Any, inherited: Sequence[Connection] | None) -> None:
        context: Any = multiprocessing.get_context("forkserver" if inherited is None else "fork")
        self.pipe, theirs = context.Pipe()
        self.tasks: list[int] = []
        self.idle = True
        own = (theirs, job, shared, dict(os.environ))
        ends = () if inherited is None else (*inherited, self.pipe)
        self.process = context.Process(target=_worker_main, args=(*own, ends), daemon=True)
        self.process.start()
        theirs.close()  # so that the worker's death is the end of the pipe

    def give(self, task: int) -> None:
        self.tasks.append(task)
        self.idle = False
        with suppress(ConnectionError):  # it died before its first task: seen by `take`
            self.pipe.send(task)

    def take(self) -> tuple[int, Any] | None:
        """Return a task and its result, or None: it could work on another task.

        Raises:
            EOFError: it died.
            Exception: the error of a task.
        """
        task, outcome = self.pipe.recv()
        self.idle = self.idle or task == self.tasks[-1]
        if outcome is None:
            return None
        self.tasks.remove(task)
        return task, result_of(outcome)

    def epitaph(self) -> str:
        self.process.join()
        code = self.process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit code {code}"

    def stop(self) -> None:
        self.pipe.close()
        self.process.join()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Reporter:
    """Adds a task's progress to its row of the counts; also records the peak memory."""

    def __init__(self, row: np.ndarray) -> None:
        self.row = row
        self.row[: Count.PEAK_KIB] = 0

    def __call__(self, **counts: int) -> None:
        for name, number in counts.items():
            self.row[Count[name.upper()]] += number
        self.row[Count.PEAK_KIB] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _worker_main(
    pipe: Connection,
    job: Job,
    shared: Any,
    environment: Mapping[str, str],
    ends: Sequence[Connection],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for end in ends:
        end.close()
    take_environment(environment)
    guard()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    counts = np.frombuffer(memoryview(shared), np.int64).reshape(-1, len(Count))
    if not ends:
        job.prepare()
    sending = threading.Lock()

    def send(task: int, outcome: Outcome | None) -> None:
        with sending:
            pipe.send((task, outcome))

    def rest_of(task: int, rest: Deferred) -> None:
        send(task, attempt(job, task, rest.finish))

    resting: threading.Thread | None = None
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        outcome = attempt(job, task, partial(job.run, task, Reporter(counts[task])))
        if not isinstance(outcome[2], Deferred):
            send(task, outcome)
            continue
        if resting is not None:
            resting.join()
        resting = threading.Thread(target=rest_of, args=(task, outcome[2]), daemon=True)
        send(task, None)
        resting.start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def granted_cpus() -> int:
    """Return how many CPUs this process may use, by affinity and by cgroup quota."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return max(count if quota is None else min(count, math.ceil(quota)), 1)


class HereRunner(Runner):
    """Runs the tasks in this process, one after the other: what it holds at `memory://` no other
    sees."""

    workers = 1

    def planned(self, tasks: int) -> str:
        """Return where `tasks` would run, in words."""
        return f"this process: {tasks:,} tasks, one after the other"

    def run(
        self, job: Job, tasks: Sequence[int], total: int, *, done: Done, watch: Watch, note: Note
    ) -> None:
        """See `base.Runner.run`."""
        counts = np.zeros((total, len(Count)), np.int64)
        job.prepare()
        for task in tasks:
            watch(counts, [task])
            done(task, whole(job.run(task, Reporter(counts[task]))))
        watch(counts, [])
