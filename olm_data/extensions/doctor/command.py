"""`olm-data doctor`: options and what is printed."""

from __future__ import annotations

import click

from olm_data.commands.said import note, refuse_given, warn
from olm_data.errors import typed
from olm_data.printing import emit


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
        from olm_data.extensions.doctor.doctor import clean as delete
        from olm_data.extensions.doctor.doctor import parse_age

        emit(delete(place, parse_age(older_than), dry_run=dry_run), as_json)
        return
    refuse_given(("older_than", "dry_run"), "--clean")
    from olm_data.extensions.doctor import doctor as verb

    report = verb.examine(place)
    emit(report, as_json)
    if report.exit_code:
        warn(f"{place} cannot be the output of a run as it is")
        ctx.exit(report.exit_code)
    note(f"next: olm-data tokenize ... --output {typed(place)}")
