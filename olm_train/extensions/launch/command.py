"""The command that starts a run elsewhere: `olm-train launch --to slurm launch.yaml`.

launch.yaml, train.yaml -> snapshot of the code -> file of the scheduler -> submitted | printed
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import yaml

from olm_data.command import Command, say
from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.errors import ResourceError, UsageError, shown
from olm_data.extras import needs
from olm_data.storage.disk import write_durable
from olm_train.extensions.launch.config import LaunchConfig

with needs("training"):
    from olm_data.mixture.lock import Lock
    from olm_train.checkpoint.documents import default_work_dir
    from olm_train.extensions.launch.jobs import IMAGES, SCHEDULERS, job
    from olm_train.extensions.launch.snapshot import Snapshot, Taken, checkout, installed, take
    from olm_train.run.config import RunConfig


def read_launch(path: str) -> LaunchConfig:
    """Return what a launch.yaml says.

    Raises:
        UsageError: it cannot be read, or a field is unknown, missing or of the wrong type.
    """
    config = parse(LaunchConfig, Values.read(path, example="launch.yaml"))
    beside = Path(path).absolute().parent / "snapshots"
    return replace(config, snapshots=config.snapshots or str(beside))  # type: ignore[arg-type]


def with_absolute_paths(given: Any, resolved: Any) -> Any:
    """Return what the user wrote, its paths as `resolved` has them: they count from no folder."""
    if isinstance(given, dict) and isinstance(resolved, dict):
        return {
            k: with_absolute_paths(v, resolved[k]) if k in resolved else v for k, v in given.items()
        }
    if isinstance(given, list) and isinstance(resolved, list) and len(given) == len(resolved):
        return [with_absolute_paths(*pair) for pair in zip(given, resolved, strict=True)]
    return resolved if isinstance(given, str) and isinstance(resolved, str) else given


def take_for(to: str, config: LaunchConfig, here: Path, *, keep: bool) -> Taken:
    """Check the configuration of the run and take a snapshot of its code.

    Args:
        to: scheduler; where nodes have an image, the packages of this machine are not in it.
        here: folder of launch.yaml.
        keep: leave the snapshot there.
    """
    sys.path[:0] = [str(here), str(checkout(here) or here)]  # as the ranks have it
    values = Values.read(config.train)
    values.override_all(config.options)
    given = copy.deepcopy(values.data)
    run = RunConfig.resolve(values)
    trainer, mixture = run.trainer, run.data_loader.mixture
    facts = Snapshot(
        files={},
        paths=(),
        packages=() if to in IMAGES else installed(),
        mixture=mixture,
        lock=Lock.read(mixture).digest,
        save_folder=trainer.save_folder,
        work_dir=trainer.work_dir or default_work_dir(trainer.save_folder),
    )
    assert config.snapshots is not None, "read_launch gives it"
    return take(
        here,
        train=yaml.safe_dump(with_absolute_paths(given, run.as_dict()), sort_keys=False),
        facts=facts,
        untracked=config.untracked,
        snapshots=Path(config.snapshots),
        keep=keep,
    )


def ask(command: Sequence[str], otherwise: str, *, stdout: int | None = None) -> str:
    """Run a scheduler's program; return what it says, "" where `stdout` is None: it prints it.

    Args:
        otherwise: what to do where it is not installed, and cannot be.

    Raises:
        ResourceError: it is not here.
        UsageError: it refused.
    """
    try:
        done = subprocess.run(command, stdout=stdout, text=True, check=False)
    except FileNotFoundError as error:
        raise ResourceError(
            f"there is no {command[0]} here", fix=f"install it, or {otherwise}"
        ) from error
    if done.returncode:
        raise UsageError(
            f"{command[0]} refused: exit code {done.returncode}",
            where=" ".join(command),
            fix="its message is above; if it is about the job, change launch.yaml",
        )
    return done.stdout or ""


@click.command(cls=Command)
@click.argument("config")
@click.option("--to", required=True, type=click.Choice(SCHEDULERS), help="Where it runs.")
@click.option("--dry-run", is_flag=True, help="Print the file that would be submitted.")
def main(config: str, to: str, dry_run: bool) -> None:
    """Start a run with a snapshot of its code, here or on a scheduler.

    \b
    olm-train launch --to slurm launch.yaml --dry-run
    olm-train launch --to slurm launch.yaml

    Code that is edited afterwards is not what runs: each start of the job runs the snapshot, or
    refuses. A job that saved and stopped is started again; one that would fail again is not.
    """
    launch = read_launch(config)
    taken = take_for(to, launch, Path(config).absolute().parent, keep=not dry_run)
    for note in taken.notes:
        say(f"warning: {note}")
    found = job(to, launch, taken)
    path = Path(f"{taken.folder}.{found.name}")
    if dry_run:
        click.echo(f"# {path}\n{shown(found.text)}", nl=False)
        return
    write_durable(path, found.text.encode())
    say(f"snapshot {taken.folder}\nfile {path}")
    if to == "local":  # signals are then its own
        os.execvp(found.command[0], [*found.command, str(path)])
    ask((*found.command, str(path)), f"submit {path} from a machine that has it")
