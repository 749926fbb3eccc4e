"""`olm-data stats --html`: the statistics of a dataset as one self-contained page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from olm_data.counts import scaled
from olm_data.errors import printable
from olm_data.extensions.stats.count import EXTREME_BYTES, ColumnCount, Extreme, Stats
from olm_data.page import COLOURS, joined, note, part, section, svg, table, write_page
from olm_data.printing import cell, shortened
from olm_data.sources.passed import passed_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = 44


def write_stats_page(stats: Stats, output: str) -> Path:
    """Write the page; return its path.

    Raises:
        UsageError: matplotlib is not installed.
    """
    sections = [
        _lengths(stats),
        _inputs(stats),
        _accounts(stats),
        *(_column(column, stats.documents) for column in stats.columns),
        _extremes("Most compressible documents", "fewest", stats.few),
        _extremes("Least compressible documents", "most", stats.many),
    ]
    return write_page(output, f"olm stats: {printable(stats.target)}", _facts(stats), sections)


def _facts(stats: Stats) -> list[tuple[str, str]]:
    per_byte = stats.tokens_per_byte
    return [
        ("documents", f"{stats.documents:,}"),
        ("tokens", f"{stats.tokens:,}"),
        ("text", f"{scaled(stats.text_bytes)}B"),
        ("tokens a byte", f"{per_byte:.4f}"),
        ("bytes a token", f"{1 / per_byte if per_byte else 0:.3f}"),
        ("held out", percent(stats.other_split, stats.documents + stats.other_split)),
        ("duplicates", percent(stats.duplicates, stats.documents + stats.other_split)),
        ("tokenizer", printable(stats.tokenizer)),
        ("digest", stats.digest[:12]),
    ]


def _lengths(stats: Stats) -> str:
    if not stats.documents:
        return ""
    edges = [b.first for b in stats.histogram] + [stats.histogram[-1].last + 1]
    # bins of equal width on the page, however few integers the first ones hold
    of_documents = [100 * b.documents / stats.documents for b in stats.histogram]
    of_tokens = [100 * b.tokens / stats.tokens for b in stats.histogram]

    def draw(axes: Axes) -> None:
        for share, colour, label in (
            (of_documents, COLOURS[0], "of documents"),
            (of_tokens, COLOURS[1], "of tokens"),
        ):
            axes.stairs(share, edges, fill=True, alpha=0.3, color=colour)
            axes.stairs(share, edges, color=colour, label=label)
        axes.axvline(stats.quantiles["0.5"], color="#888", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("length, tokens (dotted: median)")
        axes.set_ylabel("share, %")
        axes.legend(frameon=False)

    names = {"0.01": "1 %", "0.1": "10 %", "0.25": "25 %", "0.5": "median", "0.75": "75 %"}
    names |= {"0.9": "90 %", "0.99": "99 %"}
    alt = f"Documents and tokens by length, {stats.shortest:,} to {stats.longest:,} tokens"
    head = ["shortest", *names.values(), "longest", "mean"]
    row = [f"{stats.shortest:,}", *(f"{stats.quantiles[key]:,.0f}" for key in names)]
    row += [f"{stats.longest:,}", f"{stats.tokens / stats.documents:,.1f}"]
    lengths = table(head, [row], numbers=len(head))
    return section("Document lengths", svg(draw, alt) + lengths + note("Quantiles are within 1 %."))


def _bars(
    bars: Sequence[tuple[str, float]],
    alt: str,
    label: str,
    colour: str,
    form: Callable[[float], str] = "{:g}".format,
) -> str:
    def draw(axes: Axes) -> None:
        heights = list(range(len(bars)))
        axes.barh(heights, [size for _, size in bars], 0.7, color=colour)
        axes.set_yticks(heights, [shortened(printable(name), NAME) for name, _ in bars])
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(lambda value, _: form(value))
        axes.set_xlabel(label)
        axes.grid(visible=False, axis="y")

    return svg(draw, alt, height=0.9 + 0.26 * len(bars))


def _inputs(stats: Stats) -> str:
    items = [*stats.inputs, *([stats.more] if stats.more else [])]

    alt = f"Tokens of {len(items):,} inputs; the table below has the numbers"
    bars = [(item.path, float(item.tokens)) for item in items]
    picture = _bars(bars, alt, "tokens", COLOURS[0], scaled) if len(items) > 1 else ""
    shown = len(stats.inputs)
    title = "Inputs" if shown == stats.inputs_all else f"The {shown:,} largest inputs"
    head = ["input", "documents", "tokens", "share", "tokens/byte", "held out", "dropped"]
    rows = [
        [
            *(printable(item.path), f"{item.documents:,}", f"{item.tokens:,}"),
            *(percent(item.tokens, stats.tokens), f"{item.tokens_per_byte:.4f}"),
            *(cell(item.held_out or None), cell(item.dropped)),
        ]
        for item in items
    ]
    return section(title, picture + table(head, rows, numbers=6))


def _accounts(stats: Stats) -> str:
    rows = [
        ("documents of this split", stats.documents),
        ("documents of the other split", stats.other_split),
        *((f"dropped: {reason}", count) for reason, count in stats.dropped.items()),
        ("records read", stats.documents_in),
    ]
    cells = [(name, f"{count:,}", percent(count, stats.documents_in)) for name, count in rows]
    copies = (
        f"{stats.duplicates:,} documents equal an earlier one, both splits together "
        f"({stats.duplicate_bytes / 1e6:,.1f} MB of text)."
        if stats.duplicates
        else "No document equals an earlier one."
    )
    return section(
        "Where the records went",
        table(("", "count", "share"), cells, numbers=2)
        + note(copies)
        + joined(note(f"Not read: {line}") for line in passed_lines(stats.passed_over)),
    )


def _column(column: ColumnCount, documents: int) -> str:
    title = f"Column {printable(column.name)}"
    nulls = f"{column.nulls:,} documents have no value." if column.nulls else ""
    if column.top is None:
        if column.least is None:
            return section(title, note(nulls))
        row = [f"{value or 0:,.6g}" for value in (column.least, column.middle, column.most)]
        odd = f" {column.odd:,} values are not finite." if column.odd else ""
        body = table(("least", "median", "most"), [row], numbers=3)
        return section(title, body + note(f"{column.kind}; the median is within 1 %. {nulls}{odd}"))
    top = [(v, n) for v, n in column.top if column.distinct is not None or n > 1]
    kinds = "Too many values to count" if column.distinct is None else f"{column.distinct:,} values"
    about = f"; counts are at most {column.error:,} too low" if column.error and top else ""
    rows = [[printable(v), f"{n:,}", percent(n, documents)] for v, n in top]

    telling = len(top) > 1 and top[0][1] > documents / 100  # a column of names has no picture
    alt = f"Share of documents by {printable(column.name)}; the table below has the numbers"
    bars = [(value, 100 * n / documents) for value, n in top]
    picture = _bars(bars, alt, "share of documents, %", COLOURS[2]) if telling else ""
    shown = table(("value", "documents", "share"), rows, numbers=2) if rows else ""
    return section(title, picture + shown + note(f"{kinds}{about}. {nulls}"))


def _extremes(title: str, which: str, extremes: list[Extreme]) -> str:
    if not extremes:
        return ""
    parts = [note(f"The {which} tokens a byte, of documents of {EXTREME_BYTES} bytes or more.")]
    for item in extremes:
        head = (
            f"document {item.document}: {item.tokens_per_byte:.4f} tokens a byte "
            f"({item.tokens:,} tokens, {item.text_bytes:,} bytes); {printable(item.input)}, "
            f"{item.position_kind} {item.position:,}"
        )
        parts.append(part("text", head, item.text))
    return section(title, joined(parts))


def percent(part: int, whole: int) -> str:
    """Return a share as a percentage that is never 0 % or 100 % unless it is exactly that."""
    if not whole or part in (0, whole):
        return "100 %" if whole and part else "0 %"
    share = 100 * part / whole
    if share < 0.001 or share > 99.9:
        return "<0.001 %" if share < 1 else ">99.9 %"
    return f"{share:.3g} %"
