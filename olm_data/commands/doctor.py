"""`olm-data doctor`: options and what is printed."""

from __future__ import annotations

import json

import click

from olm_data.commands.said import note, refuse_given, warn
from olm_data.errors import printable, typed
from olm_data.redaction import redacted


@click.command()
@click.argument("place", metavar="DIR|URL")
@click.option("--clean", is_flag=True, help="Instead: delete what killed runs left behind.")
@click.option(
    "--older-than", default="1d", show_default=True, help="With --clean: least age: 30m, 12h, 1d."
)
@click.option("--dry-run", is_flag=True, help="With --clean: list only; delete nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.pass_context
def doctor(
    ctx: click.Context, place: str, clean: bool, older_than: str, dry_run: bool, as_json: bool
) -> None:
    """Try out a folder or bucket as the output of a run: writes, reads and removes probes.

    With --clean it deletes staging files, heartbeats and unfinished uploads of killed runs.

    \b
    olm-data doctor s3://bucket/tokens
    olm-data doctor ./tokens
    olm-data doctor s3://bucket/tokens/books --clean --dry-run
    olm-data doctor ./tokens/books --clean --older-than 12h
    """
    if clean:
        _clean(place, older_than, dry_run, as_json)
        return
    refuse_given(("older_than", "dry_run"), "--clean")
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


def _clean(place: str, older_than: str, dry_run: bool, as_json: bool) -> None:
    from olm_data import clean as verb
    from olm_data.counts import duration

    stale = verb.find(place, verb.parse_age(older_than))
    if not dry_run:
        verb.remove(place, stale)
    if as_json:
        found = [item.to_json() for item in stale]
        click.echo(json.dumps({"place": place, "deleted": not dry_run, "found": found}, indent=1))
        return
    verdict = "would delete" if dry_run else "deleted"
    for item in stale:
        age = "its writer is dead" if item.seconds is None else f"{duration(item.seconds)} old"
        click.echo(f"{verdict} {item.kind} {printable(item.name)} ({item.bytes:,} bytes, {age})")
    size = sum(item.bytes for item in stale)
    click.echo(f"{verdict} {len(stale)} things, {size:,} bytes, below {printable(place)}")
