"""`olm-data status`: options and what is printed."""

from __future__ import annotations

import click

from olm_data.printing import emit


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

    emit(read_status(output), as_json)
