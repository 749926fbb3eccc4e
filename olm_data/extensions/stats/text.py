"""What `olm-data stats` prints: counts and a histogram as text, fit to the width there is."""

from __future__ import annotations

import textwrap

from olm_data.counts import counted
from olm_data.errors import printable
from olm_data.extensions.stats.count import EXTREME_BYTES, ColumnCount, Extreme, InputCount, Stats
from olm_data.sources.passed import passed_lines
from olm_data.tables import aligned, shortened_end

BLOCKS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"
TEXT_TOP = 5


def stats_lines(stats: Stats, width: int) -> list[str]:
    """Return the statistics as lines of at most about `width` characters."""
    lines = [f"{printable(stats.target)}  digest {stats.digest[:16]}"]
    for line in _totals(stats):
        lines += _wrapped(line, width, 14)
    if not stats.documents:
        return lines
    lines += ["", "length of documents in tokens", *_lengths(stats, width)]
    lines += ["", _inputs_head(stats), *_inputs(stats, width)]
    for column in stats.columns:
        lines += ["", *_column(column, stats.documents, width)]
    for name, extremes in (("fewest", stats.few), ("most", stats.many)):
        if extremes:
            lines += ["", f"{name} tokens a byte, of documents of {EXTREME_BYTES} bytes or more"]
            lines += [_extreme(extreme, width) for extreme in extremes]
    return lines


def _wrapped(line: str, width: int, indent: int) -> list[str]:
    """Break a line between words; the lines after the first are indented."""
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


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


def _totals(stats: Stats) -> list[str]:
    per_byte = stats.tokens_per_byte
    held = f"{counted(stats.other_split, 'document')}, " + percent(
        stats.other_split, stats.other_split + stats.documents
    )
    lines = [
        f"  {stats.split:<11} {counted(stats.documents, 'document')}, {stats.tokens:,} tokens, "
        f"{stats.text_bytes / 1e6:,.1f} MB of text, "
        f"{counted(stats.shards, 'shard')}",
        f"  {'tokenizer':<11} {printable(stats.tokenizer)}: {per_byte:.4f} tokens a byte, "
        f"{1 / per_byte if per_byte else 0:.3f} bytes a token",
        f"  {'held out':<11} {held if stats.split == 'train' else 'this is the held-out split'}",
    ]
    dropped = [f"{count:,} {reason}" for reason, count in stats.dropped.items()]
    lines.append(
        f"  {'dropped':<11} {', '.join(dropped) or 'nothing'} of "
        f"{counted(stats.documents_in, 'record')}"
    )
    lines += [f"  {'not read':<11} {line}" for line in passed_lines(stats.passed_over)]
    copies = f"{counted(stats.duplicates, 'document')} ({percent(stats.duplicates, _all(stats))})"
    size = f", {stats.duplicate_bytes / 1e6:,.1f} MB of text"
    return [*lines, f"  {'duplicates':<11} " + (copies + size if stats.duplicates else "none")]


def _all(stats: Stats) -> int:
    return stats.documents + stats.other_split


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
    return [*lines, *_wrapped(summary, width, 2)]


def _inputs_head(stats: Stats) -> str:
    shown = len(stats.inputs)
    if shown == stats.inputs_all:
        return counted(shown, "input")
    return f"the {shown:,} largest of {counted(stats.inputs_all, 'input')}"


def _inputs(stats: Stats, width: int) -> list[str]:
    def row(item: InputCount) -> tuple[str, ...]:
        return (
            f"  {printable(item.path)}",
            f"{item.documents:,}",
            f"{item.tokens:,}",
            percent(item.tokens, stats.tokens),
            f"{item.tokens_per_byte:.4f}",
            ", ".join(f"{count:,} {reason}" for reason, count in item.dropped.items()) or "-",
        )

    items = [*stats.inputs, *([stats.more] if stats.more else [])]
    head = ("  input", "documents", "tokens", "share", "tokens/byte", "dropped")
    rows = [head, *map(row, items)]
    if not any(item.dropped for item in items):
        rows = [cells[:-1] for cells in rows]
    if width < 80:  # a narrow terminal: counts only
        rows = [cells[:3] for cells in rows]
    return aligned(rows, width)


def _column(column: ColumnCount, documents: int, width: int) -> list[str]:
    nulls = f", {column.nulls:,} without a value" if column.nulls else ""
    head = f"column {printable(column.name)} ({column.kind}){nulls}"
    if column.top is None:
        if column.least is None:
            return [head]
        odd = f", {column.odd:,} not finite" if column.odd else ""
        return [
            head,
            f"  least {column.least:,.6g}, median {column.middle:,.4g}, "
            f"most {column.most:,.6g}{odd}",
        ]
    distinct = "many values" if column.distinct is None else f"{column.distinct:,} values"
    if column.distinct == 1:
        distinct = "1 value"
    about = f" (counts at most {column.error:,} too low)" if column.error else ""
    rows = [
        (f"  {printable(value)}", f"{count:,}", percent(count, documents))
        for value, count in column.top[:TEXT_TOP]
        if column.distinct is not None or count > 1
    ]
    return [f"{head}: {distinct}{about if rows else ''}", *aligned(rows, width)]


def _extreme(extreme: Extreme, width: int) -> str:
    text = printable(" ".join(extreme.text.split()))
    line = f"  {extreme.tokens_per_byte:.3f}  document {extreme.document}  {text}"
    return shortened_end(line, width)
