"""Run tasks as Ray tasks, one CPU each, on a Ray cluster or on one started here.

    parent --(job once, by the object store; task numbers, `workers` at a time)--> Ray workers
    parent <--(result | error of the job)--------------------------------------------'
    parent <--(heartbeats)-- storage <------------------------------------------------'

Only as many tasks as may run are submitted, so a plan of a hundred thousand tasks costs Ray no more
than one of a hundred. A worker or node that dies costs the task it had: the parent sees it and
submits that task again, at most `RETRIES` times.
"""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from olm_data.errors import StorageError, said_by
from olm_data.extras import needs
from olm_data.runners.base import (
    Count,
    Done,
    Job,
    Note,
    Outcome,
    Runner,
    StoredJob,
    Watch,
    after_death,
    attempt,
    result_of,
    whole,
)
from olm_data.runners.heartbeat import Heartbeat, read_beats
from olm_data.runners.local import Reporter
from olm_data.sinks import guard
from olm_data.storage.objects import VARIABLE
from olm_data.storage.store import Store

TICK_SECONDS = 1.0
"""How often the parent looks at the heartbeats while it waits for results."""


class RayRunner(Runner):
    """Runs the tasks on Ray.

    Args:
        workers: tasks at a time, or None for the CPUs the cluster has at the start.
        address: of the cluster, as `ray.init` takes it; None for the one that RAY_ADDRESS names, or
            a new one on this machine.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, workers: int | None, *, address: str | None = None) -> None:
        with needs("this runner", where="--runner ray"):
            import ray
        self._ray: Any = ray
        self.address = address
        self._wanted = workers
        self.workers = workers or 1

    def planned(self, tasks: int) -> str:
        """Return where `tasks` would run, in words; Ray is not asked."""
        most = "all CPUs of the cluster" if self._wanted is None else f"{self._wanted:,} at a time"
        return f"ray: {tasks:,} tasks, {most}"

    def run(
        self, job: Job, tasks: Sequence[int], total: int, *, done: Done, watch: Watch, note: Note
    ) -> None:
        """See `base.Runner.run`."""
        assert isinstance(job, StoredJob), "workers elsewhere read and write storage"
        ours = not self._ray.is_initialized()
        if ours:
            self._connect()
        self.workers = self._wanted or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        try:
            self._run(job, deque(tasks), total, done, watch, note)
        finally:
            if ours:
                self._ray.shutdown()

    def _connect(self) -> None:
        local = self.address is None and "RAY_ADDRESS" not in os.environ
        if local:  # the library's own switch: a cluster of ours calls nobody
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            self._ray.init(
                address="local" if local else self.address,
                num_cpus=self._wanted if local else None,
                include_dashboard=False if local else None,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StorageError(
                "no Ray cluster answers",
                where=f"--ray-address {self.address or os.environ.get('RAY_ADDRESS')}",
                why=said_by(error),
                fix="ray status shows whether it is up; without --ray-address one is started here",
            ) from error

    def _run(
        self, job: StoredJob, todo: deque[int], total: int, done: Done, watch: Watch, note: Note
    ) -> None:
        ray = self._ray
        one = ray.remote(num_cpus=1, max_retries=0)(_one)
        held = ray.put((job, os.environ.get(VARIABLE, "")))
        given: dict[Any, int] = {}
        deaths = Counter[int]()
        counts = np.zeros((total, len(Count)), np.int64)
        try:
            while todo or given:
                while todo and len(given) < self.workers:
                    task = todo.popleft()
                    given[one.remote([held], task)] = task
                ready, _ = ray.wait(list(given), timeout=TICK_SECONDS)
                for reference in ready:
                    task = given.pop(reference)
                    try:
                        outcome, row = ray.get(reference)
                    except (
                        ray.exceptions.WorkerCrashedError,
                        ray.exceptions.NodeDiedError,
                        ray.exceptions.OutOfMemoryError,
                        ray.exceptions.ObjectLostError,
                    ) as error:
                        deaths[task] += 1
                        after_death(
                            "a Ray worker",
                            type(error).__name__,
                            job.describe(task),
                            deaths[task],
                            note,
                            why=said_by(error),
                            fix="run again on nodes with more memory a CPU, or with fewer "
                            "--workers; finished shards are kept",
                        )
                        todo.appendleft(task)
                        continue
                    counts[task] = row
                    done(task, result_of(outcome))
                if not ready:
                    _hear(Store(job.output), set(given.values()), counts)
                watch(counts, sorted(given.values()))
        except BaseException:  # an error or Ctrl-C: nobody waits for the rest
            for reference in given:
                ray.cancel(reference, force=True)
            raise


def _hear(output: Store, given: set[int], counts: np.ndarray) -> None:
    """Copy the counts of running tasks from their workers' heartbeats."""
    for beat in read_beats(output, "ray-"):
        for task, row in beat.running.items():
            if task in given:
                counts[task] = row


def _one(held: list[Any], task: int) -> tuple[Outcome, np.ndarray]:
    """Do one task in a Ray worker: its outcome and its counts, int64 [len(Count)]."""
    job, heartbeat = _place(held[0])
    row = np.zeros(len(Count), np.int64)
    with heartbeat.during(task, row):
        return attempt(job, task, lambda: whole(job.run(task, Reporter(row)))), row


@lru_cache(maxsize=1)
def _place(reference: Any) -> tuple[StoredJob, Heartbeat]:
    """The job and the heartbeat of this process: fetched once, as is the job's encoder."""
    import ray

    guard()
    name = f"ray-{socket.gethostname()}-{os.getpid()}"
    job, os.environ[VARIABLE] = ray.get(reference)
    job = job.beside(name)
    job.prepare()
    return job, Heartbeat(Store(job.output), name, note=print)
