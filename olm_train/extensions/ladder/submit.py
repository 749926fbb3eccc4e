"""Trains the points of a ladder on Slurm, a job each.

LadderRuns -> without what has finished (run.py), without what squeue lists
      -> snapshot of the code, NAME.slurm.sbatch in the ladder's folder -> sbatch

A fork waits for its trunk: `--dependency=afterok`. A job is known by the path of its file, so the
same command, given again, submits what has failed or was cancelled.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import click

from olm_data.counts import counted
from olm_data.errors import UsageError, shown
from olm_data.storage.disk import write_durable
from olm_train.extensions.ladder.run import LadderRun, LadderRuns
from olm_train.extensions.launch.command import ask, take_for
from olm_train.extensions.launch.config import LaunchConfig
from olm_train.extensions.launch.jobs import SBATCH, job

ELSEWHERE = "work where Slurm is"


def path_of(batch: LadderRuns, name: str) -> Path:
    """Return the file of a point's job, absolute."""
    return batch.results.parent.absolute() / f"{name}.slurm.sbatch"


def launch_of(launch: LaunchConfig, batch: LadderRuns, task: LadderRun) -> LaunchConfig:
    """Return how the run of a point is launched; its log is beside its file.

    Raises:
        UsageError: launch.yaml is of another run, or would change it.
    """
    if os.path.realpath(launch.train) != os.path.realpath(batch.base) or launch.options:
        raise UsageError(
            "jobs of a ladder train its base as it is",
            where="launch.yaml: train, options",
            fix=f"set train to {batch.base}, and put the options into that file",
        )
    log = path_of(batch, task.name).with_name(f"{task.name}-%j.log")
    slurm = replace(launch.slurm, options={"output": str(log), **launch.slurm.options})
    name = f"{launch.name[:31]}-{task.name[-8:]}"  # of 40 letters
    return replace(launch, name=name, options=[*task.options], slurm=slurm)


def command_of(batch: LadderRuns, task: LadderRun, jobs: Mapping[str, str]) -> list[str]:
    """Return what submits a point: a fork after its trunk, if that has a job.

    Args:
        jobs: by their files.
    """
    trunk = jobs.get(str(path_of(batch, task.begins)))
    after = [f"--dependency=afterok:{trunk}", "--kill-on-invalid-dep=yes"] if trunk else []
    return [*SBATCH, *after, str(path_of(batch, task.name))]


def queued() -> dict[str, str]:
    """Return the jobs of this user that wait or run, by their files."""
    said = ask(("squeue", "--me", "-h", "-o", "%i %o"), ELSEWHERE, stdout=subprocess.PIPE)
    lines = (line.partition(" ") for line in said.splitlines())
    return {path: job for job, _, path in lines}


def submit(
    batch: LadderRuns,
    launch: LaunchConfig,
    here: Path,
    say: Callable[[str], None],
    *,
    dry_run: bool,
) -> int:
    """Submit the points that neither have finished nor are in the queue.

    Args:
        here: folder of launch.yaml.
        dry_run: print commands and files; a trunk is named where it has no job yet.

    Returns:
        How many have not finished.

    Raises:
        ResourceError: Slurm is not here.
        UsageError: launch.yaml is of another run; sbatch refuses.
    """
    left, notes = batch.left(keep=not dry_run), set[str]()
    jobs = {} if dry_run and not shutil.which("squeue") else queued()
    missing = [task for task in left if str(path_of(batch, task.name)) not in jobs]
    for task in missing:
        path, command = path_of(batch, task.name), command_of(batch, task, jobs)
        config, text, found = launch_of(launch, batch, task), "", task.name
        if task.prepare and not dry_run:
            task.prepare()
        if not (task.prepare and dry_run):  # what it reads is there
            taken = take_for("slurm", config, here, keep=not dry_run)
            text = job("slurm", config, taken).text
            notes |= {*taken.notes}
        if dry_run:
            click.echo(f"# {shlex.join(command)}\n{shown(text)}")
        else:
            write_durable(path, text.encode())
            found = ask(command, ELSEWHERE, stdout=subprocess.PIPE).strip().partition(";")[0]
            say(f"job {found}: {task.name}")
        jobs[str(path)] = found
    for note in sorted(notes):
        say(f"warning: {note}")
    if left and not dry_run:
        say(
            f"{counted(len(missing), 'job')} submitted, {len(left) - len(missing):,} in the queue "
            "before; when they have ended, the same command keeps what they found"
        )
    return len(left)
