"""`olm-data stats`: options and what is printed."""

from __future__ import annotations

import click

from olm_data.command import CountParam
from olm_data.commands.said import note, show_progress
from olm_data.counts import counted
from olm_data.errors import typed
from olm_data.printing import emit


@click.command()
@click.argument("dataset", metavar="DATASET")
@click.option("--top", type=CountParam(1), default=20, show_default=True, help="Inputs listed.")
@click.option("--html", "page", help="Also write a page with pictures to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def stats(dataset: str, top: int, page: str | None, as_json: bool) -> None:
    """Count what is in a dataset: inputs, lengths, drops, kept columns, duplicates, extremes.

    \b
    olm-data stats ./tokens/books
    olm-data stats s3://bucket/tokens/web --html web.html
    """
    from olm_data.dataset.target import dataset_root
    from olm_data.extensions.stats import count as verb
    from olm_data.storage.output_paths import refuse_output

    if page is not None:
        refuse_output(page, "--html", "local file")
    with show_progress("stats") as progress:
        found = verb.collect(
            dataset_root(dataset),
            top=top,
            watch=lambda done, total: progress.update(
                done / max(total, 1), f"{done:,} of {counted(total, 'document')}"
            ),
        )
    if page is not None:
        from olm_data.extensions.stats.page import write_stats_page

        write_stats_page(found, page)
    emit(found, as_json)
    if page is not None:
        note(f"wrote {page}")
    following = found.few[0].document if found.few else 0
    note(f"next: olm-data show document {typed(dataset)} {following}")
