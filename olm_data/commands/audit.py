"""`olm-data audit`: options and what is printed."""

from __future__ import annotations

import json
import sys

import click

from olm_data.commands.said import note, warn
from olm_data.errors import ValidationError


@click.command()
@click.argument("run", type=click.Path(file_okay=False))
@click.option("--lock", help="Lock of the run.  [default: the copy in its newest checkpoint]")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_context
def audit(ctx: click.Context, run: str, lock: str | None, as_json: bool) -> None:
    """Compare what a mixture planned with what a run trained on, from the run's own log.

    \b
    olm-data audit runs/olm-1m
    olm-data audit runs/olm-1m --json

    RUN is the trainer.save_folder. Exit code 3 when they differ.
    """
    from rich.console import Console

    from olm_data.audit.compare import audit as verb
    from olm_data.audit.compare import find_lock, read_log
    from olm_data.audit.show import print_audit

    log = read_log(run)
    for remark in log.notes:
        warn(remark)
    found = verb(find_lock(log, lock), log)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        print_audit(found, Console(width=None if sys.stdout.isatty() else 140))
    if not found.agrees:
        note("next: olm-data peek LOCK --row N   shows what a row holds")
        ctx.exit(ValidationError.exit_code)
