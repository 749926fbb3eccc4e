"""`olm-data work`: options and what is printed."""

from __future__ import annotations

import os
import signal
import socket

import click

from olm_data.command import CountParam
from olm_data.commands.said import note


@click.command()
@click.argument("output")
@click.option("--tasks", required=True, help="Task numbers: 3-7,9, or @NAME of a list in run/.")
@click.option("--part", help="Of these tasks, those of part INDEX/COUNT.")
@click.option("--workers", type=CountParam(1), default=1, show_default=True, help="Processes.")
@click.option("--name", help="Name of this worker's heartbeat.  [default: host and process id]")
@click.option("--trust", is_flag=True, help="Import classes that the run names: I trust it.")
def work(
    output: str, tasks: str, part: str | None, workers: int, name: str | None, trust: bool
) -> None:
    """Do some tasks of a run that `olm-data tokenize` began, from what is in storage alone.

    \b
    olm-data work s3://bucket/tokens/web --tasks 3-7,9
    olm-data work ./tokens/web --tasks 0-999 --part 2/8 --workers 4

    Finished tasks are skipped. When all tasks are done, the tokenize command writes the manifest.
    """
    from olm_data.tokenization import work as verb

    # Batch systems end a job by SIGTERM, and after a grace time by SIGKILL.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = verb.find_tasks(output, tasks, part)
    done = verb.work(
        output,
        wanted,
        workers=workers,
        name=name or f"work-{socket.gethostname()}-{os.getpid()}",
        note=note,
        trust=trust,
    )
    click.echo(f"{done:,} tasks done, {len(wanted) - done:,} were finished before")
