"""`olm-data status`: options and what is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from olm_data.commands.said import print_json
from olm_data.counts import counted

if TYPE_CHECKING:
    from olm_data.tokenization.status import Status

SHOWN_WORKERS = 20


@click.command()
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def status(output: str, as_json: bool) -> None:
    """Show how far a run is, from what is in storage: running, dead or complete.

    \b
    olm-data status ./tokens/books
    olm-data status s3://bucket/tokens/web --json
    """

    from olm_data.tokenization.status import read_status

    found = read_status(output)
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(_lines(found)))


def _lines(status: Status) -> list[str]:
    from olm_data.counts import duration
    from olm_data.errors import printable

    lines = [
        f"{status.output}: {status.state}",
        f"  tasks    {status.done:,} of {status.tasks:,} done, {status.running:,} running, "
        f"{status.left:,} left",
        f"  written  {status.tokens:,} tokens in {counted(status.documents, 'document')}",
    ]
    if status.error:
        lines.insert(1, f"  error    {printable(status.error)}")
    if status.text_bytes_per_second:
        left = status.seconds_left
        more = "" if left is None else f", about {duration(left)} left"
        lines.append(f"  speed    {status.text_bytes_per_second / 1e6:.1f} MB/s of text{more}")
    # those that need somebody to look come first
    order = {"dead": 0, "failed": 1, "running": 2, "interrupted": 3, "done": 4}
    workers = sorted(status.workers, key=lambda worker: order.get(worker.state, 5))
    for worker in workers[:SHOWN_WORKERS]:
        lines.append(
            f"  {printable(worker.name)} on {printable(worker.host)} ({worker.pid}): "
            f"{worker.state}, heard of {duration(worker.seconds_since_heard)} ago, "
            f"{worker.done:,} tasks done, {len(worker.running):,} running, "
            f"{counted(worker.documents, 'document')}"
        )
    if len(workers) > SHOWN_WORKERS:
        lines.append(f"  and {len(workers) - SHOWN_WORKERS:,} more workers (--json shows them all)")
    return [*lines, f"next: {status.next}"]
