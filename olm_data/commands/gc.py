"""`olm-data gc`: options and what is printed."""

from __future__ import annotations

import json

import click

from olm_data.errors import printable


@click.command()
@click.argument("place", metavar="DIR|URL")
@click.option("--older-than", default="1d", show_default=True, help="Minimum age: 30m, 12h, 1d.")
@click.option("--dry-run", is_flag=True, help="List only; delete nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def gc(place: str, older_than: str, dry_run: bool, as_json: bool) -> None:
    """Delete what killed runs left behind: staging files, heartbeats, unfinished uploads of ours.

    \b
    olm-data gc s3://bucket/tokens/books --dry-run
    olm-data gc ./tokens/books --older-than 12h
    """
    from olm_data import gc as verb
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
