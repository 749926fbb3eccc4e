"""`olm-data verify`: options and what is printed."""

from __future__ import annotations

import json

import click

from olm_data.errors import ValidationError


@click.command()
@click.argument("target", metavar="DIR|LOCK")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def verify(ctx: click.Context, target: str, as_json: bool) -> None:
    """Check every byte of a dataset, or of all datasets of a lock, against its digests.

    \b
    olm-data verify ./tokens/books
    olm-data verify manifest.lock.json
    """
    from olm_data import verify as verb
    from olm_data.progress import Progress, duration

    with Progress("verify") as progress:
        report = verb.verify(
            target,
            watch=lambda read, total: progress.update(
                read / max(total, 1), f"{read / max(progress.seconds, 1e-9) / 1e6:,.0f} MB/s"
            ),
        )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        for finding in report.findings:
            click.echo(str(finding))
        for note in report.notes:
            click.echo(f"note: {note}")
        state = "verified" if report.ok else f"FAILED, {len(report.findings)} findings:"
        rate = report.bytes_read / max(report.seconds, 1e-9) / 1e6
        click.echo(
            f"{state} {target}: {report.tokens:,} tokens, {report.documents:,} documents, "
            f"{report.shards:,} shards in {len(report.datasets)} datasets; {report.round_trip} "
            f"documents decoded and encoded again; {duration(report.seconds)}, {rate:,.0f} MB/s"
        )
    if not report.ok:
        click.echo(
            "next: restore the files named above from a copy, or tokenise again into a new output",
            err=True,
        )
        ctx.exit(ValidationError.exit_code)
