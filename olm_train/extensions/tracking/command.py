"""Show a run on a tracker: `olm-train track RUN --to NAME` brings what is missing there.

    RUN/metrics.jsonl, starts.jsonl, tracking.json -> Feeder -> the tracker, which goes on

A run that is over, one that was killed, and one that never had a tracker; options of the callback
are those of the run's configuration.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from olm_data.bounded_json import JsonObject
from olm_data.command import Command, say
from olm_data.config.convert import parse
from olm_data.config.import_path import import_path, is_import_path, load_class
from olm_data.config.values import Values
from olm_data.errors import InputError, OlmError, StorageError, UsageError, printable, suggest
from olm_data.extensions.watching.follow import last_step
from olm_data.extras import needs
from olm_data.path_kinds import nearest
from olm_data.redaction import redacted
from olm_data.run_log.log import METRICS, read_starts
from olm_data.storage.store import is_remote

with needs("showing a run on a tracker"):
    from olm_train.extensions.tracking.callback import TrackerCallback
    from olm_train.extensions.tracking.comet import CometCallback
    from olm_train.extensions.tracking.feeder import Feeder
    from olm_train.extensions.tracking.tensorboard import TensorBoardCallback
    from olm_train.extensions.tracking.trackio import TrackioCallback
    from olm_train.extensions.tracking.wandb import WandBCallback

TRACKERS: dict[str, type[TrackerCallback]] = {
    kind.kind: kind for kind in (WandBCallback, CometCallback, TensorBoardCallback, TrackioCallback)
}


def replay(folder: Path, to: TrackerCallback, config: JsonObject) -> int:
    """Bring to a tracker what it has not of a run; return the steps brought.

    Raises:
        MissingExtra: its client is not installed.
        ConflictError: another process feeds it from this run.
        StorageError: the tracker fails.
    """
    to.check_installed()
    feeder = Feeder(
        to.tracker(to.tracked_run(folder, config)),
        folder,
        step=last_step(folder),
        say=say,
        save_folder=_save_folder(config),
    )
    try:
        return feeder.replay()
    except OlmError:
        raise
    except Exception as error:
        have = feeder.tracked.step if feeder.tracked else 0
        raise StorageError(
            f"{to.kind} failed: {redacted(f'{type(error).__name__}: {error}')}",
            where=str(folder),
            why=f"it has surely taken {have:,} of {last_step(folder):,} steps",
            fix="run the same command again: it goes on from there",
        ) from error


def _save_folder(config: JsonObject) -> str | None:
    """Return the remote save folder that a run's configuration names, else None."""
    place = (config.get("trainer") or {}).get("save_folder")
    return place if isinstance(place, str) and is_remote(place) else None


def named(name: str) -> type[TrackerCallback]:
    """Return the callback of a tracker: one of ours by its name, or one by its import path.

    Raises:
        UsageError: there is none.
    """
    if name in TRACKERS:
        return TRACKERS[name]
    if is_import_path(name):
        return load_class(name, TrackerCallback, where="--to")
    what = f"there is no tracker {printable(name)[:80]}"
    raise UsageError(what, where="--to", fix=suggest(name, TRACKERS))


def configured(kind: type[TrackerCallback], config: JsonObject) -> TrackerCallback:
    """Return the callback of a tracker as a run's configuration has it, else with defaults."""
    sections = config.get("trainer", {}).get("callbacks", {})
    section, known = sections.get(kind.kind) or {}, {field.name for field in fields(kind)}
    if kind not in TRACKERS.values():
        path = import_path(kind)
        known.discard("name")  # it is the path
        section = next((each for each in sections.values() if (each or {}).get("name") == path), {})
    return parse(kind, Values({name: section[name] for name in section if name in known}))


@click.command(cls=Command)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    metavar=f"{'|'.join(sorted(TRACKERS))}|MODULE:CLASS",
    help="The tracker, or the callback of one of your own.",
)
@click.option("--name", help="Of the run there; default: by its configuration, or its folder.")
@click.option("--project", help="There; default: by the run's configuration, or olm.")
@click.option("--dry-run", is_flag=True, help="Only say how many steps the run has.")
def main(run: Path, to: str, name: str | None, project: str | None, dry_run: bool) -> None:
    """Bring to a tracker what it does not have of a run: RUN is its folder.

    \b
    olm-train track runs/first --to tensorboard
    """
    if not (run / METRICS).exists():
        raise InputError(
            f"this is not a run folder: it has no {METRICS}",
            where=str(run),
            fix=nearest(run, "give the trainer.save_folder of a run, or its work_dir"),
        )
    run = run.resolve()
    starts = read_starts(run)
    config = starts[-1].config if starts else {}
    given: Any = {key: text for key, text in (("name", name), ("project", project)) if text}
    callback = replace(configured(named(to), config), **given)
    if dry_run:
        click.echo(f"{run}: {last_step(run):,} steps, for {to}")
        return
    fed = replay(run, callback, config)
    click.echo(f"{callback.kind}: {fed:,} steps brought, up to step {last_step(run):,}")
