"""The numbers of a lock as tables on a terminal: what `olm-data mix` prints."""

from __future__ import annotations

from rich.console import Console

from olm_data.errors import printable
from olm_data.mixture.lock import Lock
from olm_data.mixture.summary import summarise
from olm_data.tables import table


def print_summary(lock: Lock, console: Console) -> None:
    """Print the numbers of a lock as tables, one a stage and one for the whole run."""
    numbers = summarise(lock)
    for stage in numbers.stages:
        length = stage.sequence_length
        parts = numbers.sequence_length // length
        cut = f", each trained as {parts:,} of {length:,} tokens" if parts > 1 else ""
        drawn = table(
            (
                *("source", "rows drawn", "tokens drawn", "epochs"),
                *("share wanted", "share got", "compile error"),
            ),
            title=f"stage {stage.name}: {stage.tokens:,} tokens, {stage.rows:,} rows{cut}",
        )
        for row in stage.sources:
            drawn.add_row(
                row.source,
                f"{row.rows:,}",
                f"{row.tokens:,}",
                f"{row.epochs:.4f}",
                f"{row.share_wanted:.4%}",
                f"{row.share_got:.4%}",
                ("capped " if row.capped else "")
                + (f"{row.compile_error:+.4%}" if row.compile_error else "0"),
            )
        console.print(drawn)
    run = table(
        (
            "source",
            "tokens available",
            "in no row",
            "padding",
            "rows drawn",
            "tokens drawn",
            "epochs",
            "max",
            "share",
        ),
        title=f"run: {numbers.tokens:,} tokens, {numbers.rows:,} rows of "
        f"{numbers.sequence_length:,} tokens, seed {numbers.seed}, order {numbers.order}",
    )
    for source in numbers.sources:
        run.add_row(
            source.source,
            f"{source.tokens_available:,}",
            f"{source.tokens_in_no_row:,}",
            f"{source.padding:.4%}" if source.padding else "0",
            f"{source.rows:,}",
            f"{source.tokens:,}",
            f"{source.epochs:.4f}",
            f"{source.max_epochs:g}",
            f"{source.share_got:.4%}",
        )

    def total(key: str) -> str:
        return f"{sum(getattr(row, key) for row in numbers.sources):,}"

    run.add_section()
    run.add_row(
        "total",
        *(total("tokens_available"), total("tokens_in_no_row"), ""),
        *(total("rows"), total("tokens"), "", "", "100%"),
    )
    console.print(run)
    for line in view_lines(lock):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def view_lines(lock: Lock) -> list[str]:
    """Return what each view kept and left out, a line a source that has one."""
    lines = []
    for source in lock.sources:
        if (view := source.view) is None:
            continue
        line = (
            f"source {source.name}: {view.documents:,} of {source.documents:,} documents kept, "
            f"{view.tokens:,} of {source.tokens:,} tokens"
        )
        if view.where is not None:
            line += f"; {view.left_by_where:,} left out by where: {printable(view.where)}"
        if view.exclude_ids is not None:
            line += (
                f"; {view.left_by_ids:,} left out by exclude_ids, of whose {view.ids:,} ids "
                f"{view.ids_unmatched:,} matched nothing"
            )
        lines.append(line)
    return lines
