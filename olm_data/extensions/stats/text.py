"""What `olm-data stats` prints: counts and a histogram as text, fit to the width there is."""

from __future__ import annotations

from olm_data.counts import counted
from olm_data.errors import printable
from olm_data.extensions.stats.count import EXTREME_BYTES, ColumnCount, Stats
from olm_data.printing import aligned, cell, fitted, record, shortened_end, terminal_width, wrapped
from olm_data.sources.passed import passed_lines

BLOCKS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"
TEXT_TOP = 5


def stats_lines(stats: Stats, width: int = 0) -> list[str]:
    """Return the statistics as lines of at most about `width` cells; 0: those of the terminal."""
    width = width or terminal_width()
    lines = [
        f"{printable(stats.target)}  digest {stats.digest[:16]}",
        *record(_totals(stats), width=width),
    ]
    if not stats.documents:
        return lines
    lines += ["", "length of documents in tokens", *_lengths(stats, width)]
    shown, whole = len(stats.inputs), stats.inputs_all
    inputs = f"the {shown:,} largest of " * (shown < whole) + counted(whole, "input")
    lines += ["", inputs, *fitted(*input_table(stats), left=(0, 6), indent="  ", width=width)]
    for column in stats.columns:
        lines += ["", *_column(column, stats.documents, width)]
    for name, extremes in (("fewest", stats.few), ("most", stats.many)):
        if extremes:
            lines += ["", f"{name} tokens a byte, of documents of {EXTREME_BYTES} bytes or more"]
        for one in extremes:
            text = printable(" ".join(one.text.split()))
            line = f"  {one.tokens_per_byte:.3f}  document {one.document}  {text}"
            lines.append(shortened_end(line, min(width, 160)))
    return lines


def bar(share: float, width: int) -> str:
    """Return a bar `share` (0 to 1) of `width` characters long, in eighths of a character."""
    whole, part = divmod(round(min(max(share, 0.0), 1.0) * width * 8), 8)
    return BLOCKS[8] * whole + (BLOCKS[part] if part else "")


def percent(part: int, whole: int) -> str:
    """Return a share as a percentage that is never 0 % or 100 % unless it is exactly that."""
    if not whole or part in (0, whole):
        return "100 %" if whole and part else "0 %"
    share = 100 * part / whole
    if share < 0.001 or share > 99.9:
        return "<0.001 %" if share < 1 else ">99.9 %"
    return f"{share:.3g} %"


def _totals(stats: Stats) -> dict[str, object]:
    per_byte, both = stats.tokens_per_byte, stats.documents + stats.other_split
    held = f"{counted(stats.other_split, 'document')}, {percent(stats.other_split, both)}"
    copies = (
        f"{counted(stats.duplicates, 'document')} ({percent(stats.duplicates, both)}), "
        f"{stats.duplicate_bytes / 1e6:,.1f} MB of text"
    )
    return {
        stats.split: f"{counted(stats.documents, 'document')}, {stats.tokens:,} tokens, "
        f"{stats.text_bytes / 1e6:,.1f} MB of text, {counted(stats.shards, 'shard')}",
        "tokenizer": f"{stats.tokenizer}: {per_byte:.4f} tokens a byte, "
        f"{1 / per_byte if per_byte else 0:.3f} bytes a token",
        "held out": held if stats.split == "train" else "this is the held-out split",
        "dropped": f"{cell(stats.dropped) or 'nothing'} of {counted(stats.documents_in, 'record')}",
        "not read": passed_lines(stats.passed_over),
        "duplicates": copies if stats.duplicates else "none",
    }


def _lengths(stats: Stats, width: int) -> list[str]:
    edges = [(f"{octave.first:,}", f"{octave.last:,}") for octave in stats.octaves]
    spans = [low if low == high else f"{low}-{high}" for low, high in edges]
    counts = [f"{octave.documents:,}" for octave in stats.octaves]
    room = max(8, min(60, width - max(map(len, spans)) - max(map(len, counts)) - 6))
    most = max(octave.documents for octave in stats.octaves)
    bars = [bar(octave.documents / most, room) for octave in stats.octaves]
    lines = aligned([("", *row) for row in zip(spans, counts, bars, strict=True)], left=(0, 3))
    shown = [("10 %", "0.1"), ("median", "0.5"), ("90 %", "0.9"), ("99 %", "0.99")]
    parts = [f"shortest {stats.shortest:,}"]
    parts += [f"{name} {stats.quantiles[key]:,.0f}" for name, key in shown]
    mean = stats.tokens / stats.documents
    summary = f"  {', '.join(parts)}, longest {stats.longest:,}, mean {mean:,.1f}"
    return [*lines, *wrapped(summary, 2, width)]


def input_table(stats: Stats) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table of the inputs; the last two columns may be empty."""
    head = ["input", "documents", "tokens", "share", "tokens/byte", "held out", "dropped"]
    return head, [
        [
            *(printable(item.path), f"{item.documents:,}", f"{item.tokens:,}"),
            *(percent(item.tokens, stats.tokens), f"{item.tokens_per_byte:.4f}"),
            *(cell(item.held_out or None), cell(item.dropped)),
        ]
        for item in (*stats.inputs, *([stats.more] if stats.more else []))
    ]


def top_table(column: ColumnCount, documents: int, most: int) -> list[list[str]]:
    """Return the most frequent values, each with its count and share."""
    return [
        [printable(value), f"{count:,}", percent(count, documents)]
        for value, count in (column.top or [])[:most]
        if column.distinct is not None or count > 1
    ]


def _column(column: ColumnCount, documents: int, width: int) -> list[str]:
    nulls = f", {column.nulls:,} without a value" if column.nulls else ""
    head = f"column {printable(column.name)} ({column.kind}){nulls}"
    if column.top is None:
        if column.least is None:
            return [head]
        odd = f", {column.odd:,} not finite" if column.odd else ""
        least, middle, most = column.least, column.middle, column.most
        return [head, f"  least {least:,.6g}, median {middle:,.4g}, most {most:,.6g}{odd}"]
    distinct = "many values" if column.distinct is None else counted(column.distinct, "value")
    rows = top_table(column, documents, TEXT_TOP)
    about = f" (counts at most {column.error:,} too low)" if column.error and rows else ""
    return [f"{head}: {distinct}{about}", *(f"  {line}" for line in aligned(rows, width - 2))]
