"""`olm-data report`: options and what is printed."""

from __future__ import annotations

import click

from olm_data.commands.said import warn


@click.command()
@click.argument("lock")
@click.option(
    "--run",
    "runs",
    multiple=True,
    type=click.Path(file_okay=False),
    help="save_folder of a run to report on; repeat it to lay runs over each other.",
)
@click.option("--output", default="report.html", show_default=True, help="HTML file to write.")
def report(lock: str, runs: tuple[str, ...], output: str) -> None:
    """Write one self-contained HTML page about a mixture, and about runs of it.

    \b
    olm-data report mixture.lock.json --run ./runs/first --output report.html
    """
    from olm_data.extensions.report.write import write_report

    click.echo(write_report(lock, tuple(dict.fromkeys(runs)), output, say=warn))
