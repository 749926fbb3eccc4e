"""`olm-data status`: options and what is printed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

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
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        click.echo("\n".join(_lines(found)))


def _lines(status: Status) -> list[str]:
    from olm_data.counts import duration
    from olm_data.errors import printable
    from olm_data.runners.base import Count
    from olm_data.tokenization.status import worker_state

    lines = [
        f"{status.output}: {status.state}",
        f"  tasks    {status.done:,} of {status.tasks:,} done, {len(status.running):,} running, "
        f"{status.tasks - status.done:,} left",
        f"  written  {status.tokens:,} tokens in {status.documents:,} documents",
    ]
    if status.error:
        lines.insert(1, f"  error    {printable(status.error)}")
    if status.rate:
        left = "" if status.left is None else f", about {duration(status.left)} left"
        lines.append(f"  speed    {status.rate / 1e6:.1f} MB/s of text{left}")
    # those that need somebody to look come first
    order = {"dead": 0, "failed": 1, "running": 2, "interrupted": 3, "done": 4}
    workers = sorted(status.workers, key=lambda beat: order.get(worker_state(beat, status.now), 5))
    for beat in workers[:SHOWN_WORKERS]:
        age, state = duration(beat.age(status.now)), worker_state(beat, status.now)
        lines.append(
            f"  {printable(beat.name)} on {printable(beat.host)} ({beat.pid}): {state}, heard of "
            f"{age} ago, {len(beat.done):,} tasks done, {len(beat.running):,} running, "
            f"{beat.counts[Count.DOCUMENTS]:,} documents"
        )
    if len(workers) > SHOWN_WORKERS:
        lines.append(f"  and {len(workers) - SHOWN_WORKERS:,} more workers (--json shows them all)")
    return [*lines, f"next: {status.next}"]
