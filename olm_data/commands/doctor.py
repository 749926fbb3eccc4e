"""`olm-data doctor`: options and what is printed."""

from __future__ import annotations

import json

import click

from olm_data.commands.said import note, warn
from olm_data.errors import printable, typed
from olm_data.redaction import redacted


@click.command()
@click.argument("place", metavar="DIR|URL")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(ctx: click.Context, place: str, as_json: bool) -> None:
    """Try out a folder or bucket as the output of a run: writes, reads and removes probes.

    \b
    olm-data doctor s3://bucket/tokens
    olm-data doctor ./tokens
    """
    from olm_data import doctor as verb

    report = verb.examine(place)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        width = max(len(finding.check) for finding in report.findings)
        for finding in report.findings:
            seen = redacted(printable(finding.seen))
            click.echo(f"{finding.state:<5} {finding.check:<{width}}  {seen}")
            if finding.fix:
                click.echo(f"{'':<5} {'':<{width}}  fix: {finding.fix}")
    if report.exit_code:
        warn(f"{place} cannot be the output of a run as it is")
        ctx.exit(report.exit_code)
    note(f"next: olm-data tokenize ... --output {typed(place)}")
