"""`olm-data peek`: options and what is printed."""

from __future__ import annotations

import json
import os
import sys

import click

from olm_data.commands.said import note, show_progress
from olm_data.errors import UsageError


@click.command()
@click.argument("target", metavar="DIR|LOCK")
@click.option("--doc", type=int, help="Number of a document.")
@click.option("--id", "identifier", help="Id of a document in its source.")
@click.option("--search", help="Text that a document holds, exactly as it is.")
@click.option("--row", type=int, help="Number of a row: of the run (LOCK) or of the dataset (DIR).")
@click.option("--first", type=click.IntRange(1), help="Most documents, rows or hits to show.")
@click.option("--of", "source", help="LOCK with --doc, --id, --search: which source's documents.")
@click.option(
    "--sequence-length",
    type=click.IntRange(1),
    default=2048,
    help="With DIR and --row: tokens of a row.",
)
@click.option("--full", is_flag=True, help="Show all of the text.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def peek(
    target: str,
    doc: int | None,
    identifier: str | None,
    search: str | None,
    row: int | None,
    first: int | None,
    source: str | None,
    sequence_length: int,
    full: bool,
    as_json: bool,
) -> None:
    """Show documents of a dataset or rows of a mixture, with their borders, ids and origin.

    \b
    olm-data peek ./tokens/books                          the first documents
    olm-data peek ./tokens/books --doc 17
    olm-data peek ./tokens/books --id isbn-0141439512
    olm-data peek ./tokens/books --search "white whale" --first 10
    olm-data peek manifest.lock.json --row 0              what the first row of training holds

    On a terminal tokens have backgrounds and special tokens are red; NO_COLOR turns that off.
    """
    from olm_data.peek import peek as verb
    from olm_data.peek.render import render

    asked = {"--doc": doc, "--id": identifier, "--search": search, "--row": row}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} do not go together", fix="give one of them")
    if first is not None and given and given[0] in ("--doc", "--row"):
        raise UsageError(f"{given[0]} is one already", where="--first", fix="leave --first out")
    wanted = verb.Wanted(
        doc=doc,
        row=row,
        id=identifier,
        search=search,
        source=source,
        sequence_length=sequence_length,
        most=first,
        full=full,
    )
    with show_progress("search") as progress:
        views = verb.peek(
            target,
            wanted,
            watch=lambda done, total: progress.update(done / total, f"{done:,} documents"),
        )
    if as_json:
        click.echo(json.dumps([view.to_json() for view in views], indent=1))
        return
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    shown = (render(view, full=full, colour=colour, found=search or "") for view in views)
    click.echo("\n\n".join(shown), color=colour)
    if search is not None and len(views) == (first or verb.FIRST_HITS):
        note(f"there may be more: --first {2 * len(views)} shows more of them")
