"""The command that makes a checkpoint without pickles of one that has them.

olm-train convert-checkpoint OLD NEW --trust

OLD: a checkpoint or run of format version 1 or 2 -> NEW: a save folder with it in version 3
"""

from __future__ import annotations

import click

from olm_data.command import Command, say
from olm_data.errors import InputError


@click.command(cls=Command)
@click.argument("old")
@click.argument("new")
@click.option("--trust", is_flag=True, help="Open the pickles of OLD: I trust whoever wrote them.")
def main(old: str, new: str, trust: bool) -> None:
    """Write a checkpoint of an older format, or a run's newest one, in the format of this release.

    \b
    olm-train convert-checkpoint runs/first/step00000100 runs/first-converted --trust

    NEW is a save folder: train with trainer.save_folder set to it to go on. OLD stays as it is.
    """
    if not trust:
        raise InputError(
            "checkpoints of format versions 1 and 2 hold pickles",
            where=old,
            why="a pickle can run commands when it is opened; this program opens it with "
            "restrictions, and only when told to",
            fix="if you trust whoever wrote it, add --trust",
        )
    from olm_train.checkpoint.convert import convert

    click.echo(convert(old, new, say=say))
