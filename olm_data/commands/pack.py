"""`olm-data pack`: options and what is printed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from olm_data.commands.said import note
from olm_data.errors import UsageError

if TYPE_CHECKING:
    from olm_data.dataset.view import View


@click.command()
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET...")
@click.option(
    "--compare", "packings", default="concat,best_fit", show_default=True, help="Packings, a,b."
)
@click.option(
    "--seq-len", "lengths", default="2048", show_default=True, help="Tokens of a row: 2048,8192."
)
@click.option("--min-tail", type=click.IntRange(1), default=1, help="Drop shorter remainders.")
@click.option(
    "--documents",
    default="16M",
    show_default=True,
    help='Look at the first N documents of each dataset; or "all".',
)
@click.option("--where", help="Take only documents whose kept columns meet a condition.")
@click.option("--exclude-ids", help="Leave out the documents whose ids are in this file.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write a page with pictures too.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def pack(
    datasets: tuple[str, ...],
    packings: str,
    lengths: str,
    min_tail: int,
    documents: str,
    where: str | None,
    exclude_ids: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """Compare ways to pack documents into rows; writes nothing but the page asked for.

    \b
    olm-data pack --compare concat,best_fit --seq-len 2048,8192 ./tokens/books ./tokens/web
    olm-data pack ./tokens/books --html packing.html
    """
    from rich.console import Console

    from olm_data.counts import parse_count
    from olm_data.packing import compare as verb

    if not all(text.isdecimal() and int(text) for text in lengths.split(",")):
        raise UsageError(
            f"{lengths!r} are not row lengths", where="--seq-len", fix="--seq-len 2048,8192"
        )
    found = verb.compare(
        datasets,
        packings.split(","),
        [int(text) for text in lengths.split(",")],
        most_documents=None if documents == "all" else parse_count(documents),
        keys={"min_tail": min_tail},
        view=_view(where, exclude_ids),
    )
    if as_json:
        click.echo(json.dumps([one.to_json() for one in found], indent=1))
    else:
        verb.print_comparisons(found, Console(width=None if sys.stdout.isatty() else 120))
    if html:
        note(f"wrote {verb.write_comparison(found, html)}")
    best = min(found, key=lambda one: (one.cut_avoidable, one.padding))
    note(f"next: write packing: {best.packing} in the mixture's manifest.yaml")


def _view(where: str | None, exclude_ids: str | None) -> View | None:
    from olm_data.dataset.view import View
    from olm_data.sources.selected import read_ids

    if where is None and exclude_ids is None:
        return None
    excluded = None if exclude_ids is None else read_ids(exclude_ids)
    return View(where, excluded, "--where" if where is not None else "--exclude-ids")
