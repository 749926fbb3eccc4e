"""Slurm's own commands, as functions: sbatch, squeue, scancel, scontrol.

Text in, values out; the only place that starts them or reads what they print.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from olm_data.errors import ResourceError, UsageError

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
