"""Run tasks as a Slurm job array whose elements are `olm-data work`.

    parent --(list of tasks: run/tasks-*, then sbatch)--> array --> olm-data work --part k/n
    parent <--(commit records, heartbeats)-- storage <--------------'
    parent <--(which elements are left)-- squeue

The parent only watches: a task is done when its commit record is in storage. What a finished array
left undone (a node's disk, a time limit, a killed job) is submitted again, until `RETRIES` + 1
arrays in a row finish no task. An interrupted parent cancels its array; one that was killed leaves
it at work, and the same command, run again, finds it by its name and follows it. Elements that are
pre-empted or lose their node are queued again by Slurm and skip what is done.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from olm_data.counts import spell_ranges
from olm_data.errors import (
    ConflictError,
    InputError,
    OlmError,
    ResourceError,
    UsageError,
    ValidationError,
)
from olm_data.regular_files import MAX_SMALL, open_regular
from olm_data.runners.base import RETRIES, Count, Done, Job, Note, Runner, StoredJob, Watch
from olm_data.runners.heartbeat import RUN, Beat, read_beats
from olm_data.storage.store import Store
from olm_data.threads import in_order

ELEMENTS_PER_WORKER = 4
"""Elements of an array for each that may run at a time: late ones even out long tasks."""
DEFAULT_WORKERS = 64
SHORTEST_POLL, LONGEST_POLL = 0.5, 15.0
LAST_POLLS = 20
"""Times that workers without a task are looked at before they are cancelled."""
SILENCE_SECONDS = 900.0
"""How long Slurm may not answer before the parent gives up following (the array goes on)."""

_FINAL = (InputError, ValidationError, ConflictError, UsageError)
"""Errors that another attempt, on another node, would only repeat."""


class SlurmRunner(Runner):
    """Runs the tasks in a job array.

    Args:
        workers: elements that run at a time, or None for 64 at most.
        options: options for sbatch, `partition=cpu` or `exclusive`.
        logs: folder for the output of the elements; every node must see it.

    Raises:
        UsageError: an option is none.
    """

    def __init__(
        self,
        workers: int | None,
        *,
        options: Sequence[str] = (),
        logs: Path = Path("olm-slurm-logs"),
    ) -> None:
        self.workers = workers or DEFAULT_WORKERS
        self.options = sbatch_options(options)
        self.logs = logs.absolute()

    def planned(self, tasks: int) -> str:
        """Return where `tasks` would run, in words; Slurm, which has limits, is not asked."""
        elements = array_elements(tasks, self.workers, tasks)
        return (
            f"slurm: an array of {elements:,}, {min(self.workers, elements):,} at a time"
            + "".join(f", {option}" for option in self.options)
            + f"; logs in {self.logs}"
        )

    def run(
        self, job: Job, tasks: Sequence[int], total: int, *, done: Done, watch: Watch, note: Note
    ) -> None:
        """See `base.Runner.run`."""
        assert isinstance(job, StoredJob), "workers elsewhere load the job from storage"
        follow = _Following(job, tasks, total, done, watch, note)
        name = array_name(job)
        array = _earlier(name, job.output)
        if array is not None:
            note(f"Slurm job {array} of an earlier command is still at work: following it")
        largest, fruitless = largest_array(), 0
        while follow.left:
            if array is None:
                array = self._submit(job, sorted(follow.left), name, largest, note)
            before = len(follow.left)
            try:
                follow.until_ended(array)
            except _Silent as silence:
                raise ResourceError(
                    f"Slurm has not answered for {SILENCE_SECONDS:.0f} s",
                    where=f"job {array}",
                    fix="the job may be at work; run the same command again to follow it",
                ) from silence
            except BaseException:  # an error or Ctrl-C: nobody is left to wait for the array
                cancel(array)
                note(f"cancelled Slurm job {array}; finished shards are kept")
                raise
            fruitless = fruitless + 1 if len(follow.left) == before else 0
            if follow.left:
                if fruitless > RETRIES:
                    raise self._given_up(job, array, follow, fruitless)
                note(f"Slurm job {array} left {len(follow.left):,} tasks undone; trying them again")
            array = None

    def _submit(
        self, job: StoredJob, tasks: Sequence[int], name: str, largest: int, note: Note
    ) -> str:
        spelled = spell_ranges(tasks).encode()
        listed = f"tasks-{hashlib.sha256(spelled).hexdigest()[:16]}"
        Store(job.output).child(RUN).put(listed, spelled)
        self.logs.mkdir(parents=True, exist_ok=True)
        elements = array_elements(len(tasks), self.workers, largest)
        options = [
            f"--job-name={name}",
            f"--array=0-{elements - 1}%{self.workers}",
            f"--output={self.logs}/%A_%a.log",
            *("--open-mode=append", "--requeue"),
            *self.options,
        ]
        array = submit(batch_script(job.output, listed, elements, trust=job.own_parts), options)
        note(
            f"Slurm job {array}: {len(tasks):,} tasks in {elements:,} elements, "
            f"at most {min(self.workers, elements):,} at a time; logs in {self.logs}"
        )
        return array

    def _given_up(
        self, job: StoredJob, array: str, follow: _Following, fruitless: int
    ) -> Exception:
        task = min(follow.left)
        elements = array_elements(len(follow.left), self.workers, largest_array())
        log = self.logs / f"{array}_{sorted(follow.left).index(task) % elements}.log"
        if follow.error is not None:
            return follow.error
        return ResourceError(
            f"Slurm ended the job of task {task} {fruitless} times before it was done",
            where=f"{job.describe(task)}; log {log}",
            why=_last_line(log),
            fix="more memory or time, such as --slurm mem-per-cpu=8G --slurm time=4:00:00; "
            "finished shards are kept",
        )


class _Silent(Exception):
    """Slurm does not answer."""


class _Following:
    """What the parent knows of the run: which tasks are left, and the counts of all workers."""

    def __init__(
        self, job: StoredJob, tasks: Sequence[int], total: int, done: Done, watch: Watch, note: Note
    ) -> None:
        self.left = set(tasks)
        self.error: Exception | None = None
        self._job, self._done, self._watch, self._note = job, done, watch, note
        self._store = Store(job.output)
        self._counts = np.zeros((total, len(Count)), np.int64)
        self._beats: dict[tuple[str, float], Beat] = {}

    def until_ended(self, array: str) -> None:
        """Follow an array until no element is left; see to finished tasks and errors.

        Raises:
            OlmError: an error of a task that no other attempt would mend.
            _Silent: Slurm does not answer.
        """
        pause, wait, silent, said = SHORTEST_POLL, threading.Event().wait, 0.0, ""
        self.error = None
        while self.left:
            now = state(array)
            running = self._hear(f"slurm-{array}-")
            self._watch(self._counts, running)
            if now is not None and now.ended:
                break
            silent = silent + pause if now is None else 0.0
            if silent > SILENCE_SECONDS:
                raise _Silent
            if now is not None and not now.running and now.waiting:
                reason = next(iter(now.waiting.values()))
                if reason not in (said, "None"):  # None: not looked at yet
                    said = reason
                    self._note(f"Slurm job {array} waits: {reason}")
            wait(pause)
            pause = min(LONGEST_POLL, pause * 1.1)
        if not self.left:
            self._dismiss(array)
        self._collect(sorted(self.left))  # a killed worker cannot have told of its last task
        self._watch(self._counts, [])

    def _dismiss(self, array: str) -> None:
        """Let the workers of a finished array end; cancel elements that wait for nothing."""
        for _ in range(LAST_POLLS):
            now = state(array)
            if now is None or now.ended:
                return
            if not now.running:
                break
            threading.Event().wait(SHORTEST_POLL)
        cancel(array)

    def _hear(self, prefix: str) -> list[int]:
        """Read the heartbeats of an array; return the running tasks."""
        final = {beat.name for beat in self._beats.values() if beat.state == "done"}
        for beat in read_beats(self._store, prefix, skip=final):
            self._beats[beat.name, beat.started] = beat
        self._count()
        self._collect(
            sorted({t for beat in self._beats.values() for t in beat.tasks_done()} & self.left)
        )
        for beat in self._beats.values():
            if beat.state == "failed" and beat.error is not None and beat.name.startswith(prefix):
                self.error = beat.error.restored()
                if isinstance(self.error, _FINAL):
                    raise self.error
        return sorted(
            {t for beat in self._latest() for t in beat.running if beat.state == "running"}
        )

    def _latest(self) -> list[Beat]:
        """The last heartbeats of each worker; a worker that was queued again is another process."""
        latest: dict[str, Beat] = {}
        for (name, started), beat in self._beats.items():
            if name not in latest or latest[name].started < started:
                latest[name] = beat
        return list(latest.values())

    def _count(self) -> None:
        """Sum up. The rows of finished tasks are only ever summed: one stands for a worker's."""
        self._counts[:] = 0
        current = {(beat.name, beat.started) for beat in self._latest()}
        for key, beat in self._beats.items():
            finished = np.array(beat.counts)
            for task, row in beat.running.items():
                finished[: Count.PEAK_KIB] -= row[: Count.PEAK_KIB]
                if key in current and beat.state == "running":
                    self._counts[task] = row
            if beat.done:
                self._counts[beat.tasks_done()[0]] += finished

    def _collect(self, tasks: Sequence[int]) -> None:
        """Take the results of those tasks whose commit records are there."""
        for task, result in zip(tasks, in_order(self._job.finished, tasks), strict=True):
            if result is not None:
                self.left.discard(task)
                self._done(task, result)


def array_name(job: StoredJob) -> str:
    """Return the job name by which a later command finds the array: `olm-OUTPUT-WORK`, hashed."""
    output, identity = (
        hashlib.sha256(text.encode()).hexdigest()[:12] for text in (job.output, job.identity)
    )
    return f"olm-{output}-{identity}"


def array_elements(tasks: int, workers: int, largest: int) -> int:
    """Return how many elements share `tasks`: no more than the cluster allows, none empty."""
    return min(tasks, largest, workers * ELEMENTS_PER_WORKER)


def _earlier(name: str, output: str) -> str | None:
    """Return the id of the array that an earlier command left at work, or None.

    Raises:
        ConflictError: an array of other work writes to the same output.
    """
    found = live_jobs(name.rsplit("-", 1)[0])
    for other in found.keys() - {name}:
        raise ConflictError(
            f"Slurm job {found[other]} of another run is still writing this output",
            where=output,
            fix=f"scancel {found[other]}, or wait until it has ended",
        )
    return found.get(name)


def batch_script(output: str, listed: str, elements: int, *, trust: bool = False) -> str:
    """Return the script of each element. `exec`: Slurm's signals must reach the worker itself.

    Args:
        trust: the job names classes of the user's own, who began the run.
    """
    words = [
        *(sys.executable, "-m", "olm_data.cli", "work", output),
        *("--tasks", f"@{listed}"),
        *(["--trust"] if trust else []),
    ]
    return (
        "#!/bin/sh\n"
        f"exec {shlex.join(words)} "
        f'--part "$SLURM_ARRAY_TASK_ID/{elements}" --workers "${{SLURM_CPUS_PER_TASK:-1}}" '
        '--name "slurm-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID"\n'
    )


def _last_line(log: Path) -> str | None:
    try:
        with open_regular(log) as file:
            file.seek(max(0, log.stat().st_size - MAX_SMALL))
            lines = file.read(MAX_SMALL).decode(errors="replace").split("\n")
    except (OSError, OlmError):
        return None  # the nodes' folder is not visible here
    said = [line for line in lines if line.strip()]
    return f"its log ends: {said[-1]}" if said else None


TIMEOUT_SECONDS = 120.0
OWN_OPTIONS = frozenset(
    {"array", "chdir", "error", "job-name", "open-mode", "output", "parsable", "requeue", "wrap"}
)
"""sbatch options that the runner sets itself."""


@dataclass(frozen=True)
class ArrayState:
    """The elements of a job array that have not ended.

    Attributes:
        running: indices of elements at work.
        waiting: index -> reason, of elements that wait.
    """

    running: frozenset[int]
    waiting: dict[int, str]

    @property
    def ended(self) -> bool:
        """Whether no element is left."""
        return not self.running and not self.waiting


def sbatch_options(given: Sequence[str]) -> list[str]:
    """Return sbatch options for `KEY=VALUE` or `KEY` words: `partition=cpu`, `exclusive`.

    Raises:
        UsageError: not an option, or one that the runner sets.
    """
    options = []
    for word in given:
        key, equals, value = word.partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", key) or (equals and not value):
            raise UsageError(
                f"--slurm {word!r} is not KEY=VALUE", fix="write --slurm partition=NAME"
            )
        if key in OWN_OPTIONS:
            raise UsageError(
                f"--slurm {key} is set by this command",
                fix="use --workers for the number of jobs at a time",
            )
        options.append(f"--{key}={value}" if equals else f"--{key}")
    return options


def submit(script: str, options: Sequence[str]) -> str:
    """Submit a batch script; return the job id.

    Raises:
        UsageError: Slurm refused it.
        ResourceError: Slurm is not here or does not answer.
    """
    done = _run(["sbatch", "--parsable", *options], script)
    if done.returncode != 0:
        raise UsageError(
            "Slurm refused the job",
            where="sbatch " + " ".join(options),
            why="; ".join(done.stderr.split("\n")).strip("; ") or f"exit code {done.returncode}",
            fix="check the --slurm options; sinfo shows partitions",
        )
    return done.stdout.strip().split(";")[0]  # ID or ID;CLUSTER


def live_jobs(prefix: str) -> dict[str, str]:
    """Return name -> id of this user's jobs that have not ended and whose names begin so.

    Raises:
        ResourceError: Slurm does not answer.
    """
    live = "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING"  # others write nothing any more
    done = _run(["squeue", "--noheader", "--me", live, "--format=%F %j"])
    if done.returncode != 0:
        raise _no_answer("squeue", done)
    jobs = [line.split(None, 1) for line in done.stdout.splitlines()]
    return {name.strip(): number for number, name in jobs if name.startswith(prefix)}


def state(job: str) -> ArrayState | None:
    """Return what the elements of a job array do; None if Slurm does not answer."""
    done = _run(["squeue", "--noheader", "--array", f"--jobs={job}", "--format=%K|%T|%r"])
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:  # it ended long ago, and Slurm forgot it
            return ArrayState(frozenset(), {})
        return None
    running, waiting = set(), {}
    for line in done.stdout.splitlines():
        index, what, reason = line.strip().split("|", 2)
        number = int(index) if index.isdecimal() else 0
        if what in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED"):
            waiting[number] = reason
        else:  # RUNNING, COMPLETING, CONFIGURING, ...
            running.add(number)
    return ArrayState(frozenset(running), waiting)


def cancel(job: str) -> None:
    """End a job; one that has ended is no error."""
    _run(["scancel", job])


def largest_array() -> int:
    """Return how many elements an array may have at most."""
    done = _run(["scontrol", "show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    if found is None:
        raise _no_answer("scontrol show config", done)
    return max(1, int(found[1]))


def _no_answer(command: str, done: subprocess.CompletedProcess[str]) -> ResourceError:
    return ResourceError(
        "Slurm does not answer",
        where=command,
        why=done.stderr.strip() or None,
        fix="check that this machine may submit jobs, then run the command again",
    )


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError as error:
        raise ResourceError(
            f"there is no {command[0]} on this machine",
            fix="run this on a machine that may submit Slurm jobs, or without --runner slurm",
        ) from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {TIMEOUT_SECONDS:.0f} s")
