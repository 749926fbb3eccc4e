"""`olm-data doctor`: options and what is printed."""

from __future__ import annotations

import click

from olm_data.commands.said import note, print_json, refuse_given, warn
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
    from olm_data.extensions.doctor import doctor as verb

    report = verb.examine(place)
    if as_json:
        print_json(report)
    else:
        from olm_data.tables import aligned

        rows: list[tuple[str, str, str]] = []
        for finding in report.findings:
            rows.append((finding.state, finding.check, redacted(printable(finding.seen))))
            rows += [("", "", f"fix: {finding.fix}")] if finding.fix else []
        click.echo("\n".join(aligned(rows, left=(0, 1, 2))))
    if report.exit_code:
        warn(f"{place} cannot be the output of a run as it is")
        ctx.exit(report.exit_code)
    note(f"next: olm-data tokenize ... --output {typed(place)}")


def _clean(place: str, older_than: str, dry_run: bool, as_json: bool) -> None:
    from olm_data.counts import duration
    from olm_data.extensions.doctor import clean as verb

    done = verb.clean(place, verb.parse_age(older_than), dry_run=dry_run)
    if as_json:
        print_json(done)
        return
    verdict = "deleted" if done.deleted else "would delete"
    for item in done.found:
        age = "its writer is dead" if item.seconds is None else f"{duration(item.seconds)} old"
        click.echo(f"{verdict} {item.kind} {printable(item.name)} ({item.bytes:,} bytes, {age})")
    size = sum(item.bytes for item in done.found)
    click.echo(f"{verdict} {len(done.found)} things, {size:,} bytes, below {printable(place)}")
