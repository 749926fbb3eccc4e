"""`olm-data report`: options and what is printed."""

from __future__ import annotations

import click


@click.command()
@click.argument("lock", type=click.Path(dir_okay=False))
@click.option("--run", type=click.Path(file_okay=False), help="save_folder of a run to report on.")
@click.option("--output", default="report.html", show_default=True, help="HTML file to write.")
def report(lock: str, run: str | None, output: str) -> None:
    """Write one self-contained HTML page about a mixture, and about a run of it.

    \b
    olm-data report mixture.lock.json --run ./runs/first --output report.html
    """
    from olm_data.report.write import write_report

    click.echo(write_report(lock, run, output))
