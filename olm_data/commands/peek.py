"""`olm-data peek`: options and what is printed."""

from __future__ import annotations

import json

import click

from olm_data.errors import UsageError


@click.command()
@click.argument("target", metavar="DIR|LOCK")
@click.option("--doc", type=int, help="Number of a document.")
@click.option("--row", type=int, help="Number of a row: of the run (LOCK) or of the dataset (DIR).")
@click.option("--of", "source", help="LOCK with --doc: which source's document.")
@click.option("--sequence-length", type=click.IntRange(1), default=2048, help="Of DIR rows.")
@click.option("--full", is_flag=True, help="Show all of the text.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def peek(
    target: str,
    doc: int | None,
    row: int | None,
    source: str | None,
    sequence_length: int,
    full: bool,
    as_json: bool,
) -> None:
    """Show documents of a dataset or rows of a mixture, with their borders, ids and origin.

    \b
    olm-data peek ./tokens/books                 the first documents
    olm-data peek ./tokens/books --doc 17
    olm-data peek manifest.lock.json --row 0     what the first row of training holds
    """
    from olm_data import peek as verb

    if doc is not None and row is not None:
        raise UsageError("--doc and --row do not go together", fix="give one of them")
    views = verb.peek(target, doc=doc, row=row, source=source, sequence_length=sequence_length)
    if as_json:
        click.echo(json.dumps([view.to_json() for view in views], indent=1))
    else:
        click.echo("\n\n".join(verb.render(view, full=full) for view in views))
