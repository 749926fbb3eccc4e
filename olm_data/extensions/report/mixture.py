"""What a report shows of a mixture lock: stages over tokens, and how often each source is seen.

Everything is computed from the lock alone, so it says what training will do, not what was asked.

Also: what a report shows of a lock's rows: what packing costs, and some rows with their
documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET

from olm_data.counts import scaled
from olm_data.extensions.show.token_text import trained_runs, trained_tokens
from olm_data.mixture.lock import Lock
from olm_data.mixture.summary import TreeNode, summarise, tree, walk
from olm_data.page import (
    COLOURS,
    colours,
    fields,
    joined,
    note,
    part,
    section,
    svg,
    table,
    whole_numbers,
)
from olm_data.rows.fields import IGNORED_LABEL
from olm_data.rows.reader import RowReader
from olm_data.rows.views import DocumentView, LockRows, RowView
from olm_data.tokenizer.tokenizer import TokenizerSpec

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes


MEASURED_ROWS = 256
SHOWN_ROWS = 6
SHOWN_PIECES = 6
SHOWN_TEXT = 280


def spread(total: int, most: int) -> np.ndarray:
    """Return int64 [min(total, most)]: row numbers evenly spread over 0 .. total - 1."""
    count = min(total, most)
    return (2 * np.arange(count, dtype=object) + 1).astype(object) * total // (2 * max(count, 1))


def packing_section(lock: Lock) -> str:
    """Return what the packing costs: of each source from the lock, of rows from a sample."""
    length = lock.sequence_length
    rows = spread(lock.total_rows, MEASURED_ROWS).astype(np.int64)
    batch = RowReader(lock).read(rows)
    # a piece starts where the position is 0; padding has no label
    pieces = (batch.positions == 0).sum(1)
    work = (batch.positions.astype(np.int64) + 1).sum()
    saved = 1 - work / (len(rows) * length * (length + 1) // 2)
    context = batch.positions.mean()
    labels = (batch.labels != IGNORED_LABEL).mean()

    def draw(axes: Axes) -> None:
        edges = np.arange(0.5, pieces.max() + 1.5)
        share, _ = np.histogram(pieces, edges)
        axes.stairs(100 * share / len(rows), edges, fill=True, color=COLOURS[0], alpha=0.8)
        axes.set_xlabel("documents in a row")
        whole_numbers(axes.xaxis)
        axes.set_ylabel("share of rows, %")

    facts = [
        ("documents in a row, mean", f"{pieces.mean():.2f}"),
        ("context of a token, mean", f"{context:,.1f} tokens"),
        ("attention work saved by masking", f"{saved:.1%}"),
        ("positions with a label", f"{labels:.3%}"),
    ]
    alt = f"Histogram of the documents in a row, {pieces.mean():.2f} on average"
    costs = ("source", "rows_available=rows", "tokens_in_no_row", "padding")
    body = fields(summarise(lock).sources, *costs) + svg(draw, alt, height=2.2)
    body += table(("measure", "value"), facts, numbers=1)
    return section(
        f"Packing: {lock.packing.name}",
        body + note(f"Lower table: {len(rows):,} rows, evenly spread over the run."),
    )


def rows_section(lock: Lock) -> str:
    """Return some rows of the run: a strip of documents, and the text at their borders."""
    shown = LockRows(lock)
    views = [shown.view(number) for number in spread(lock.total_rows, SHOWN_ROWS).tolist()]
    remark = note("Each colour is one document; attention and loss stay inside it.")
    rows = (_row(view, shown.tokenizer_of(view.source)) for view in views)
    return section("Sample rows", joined([remark, _legend(views), *rows]))


def _legend(views: Sequence[RowView]) -> str:
    """Return how trained tokens are marked, and what share of these rows they are; "" of all."""
    pieces = [piece for view in views for piece in view.pieces]
    if all(piece.trained is UNSET for piece in pieces):
        return ""
    return part("trained", sum(map(trained_tokens, pieces)) / sum(len(p.ids) for p in pieces))


def _row(view: RowView, tokenizer: TokenizerSpec) -> Markup:
    pieces = []
    for i, piece in enumerate(view.pieces):
        size = piece.stop - piece.start
        name = piece.id or f"document {piece.document}"
        part_of = "" if size == piece.tokens else f", of {piece.tokens:,}"
        origin = f"{piece.input}, {piece.position_kind} {piece.position:,}"
        if piece.trained is not UNSET:
            origin += f" \u00b7 trained {100 * trained_tokens(piece) / size:.1f} % of these"
        pieces.append(
            {
                "name": name,
                "size": size,
                "colour": COLOURS[i % len(COLOURS)],
                "head": f"{name} \u00b7 {size:,} tokens{part_of} \u00b7 {origin}",
                "runs": _shortened(piece, tokenizer) if i < SHOWN_PIECES else None,
            }
        )
    rest = len(view.pieces) - SHOWN_PIECES
    title = (
        f"row {view.row:,}: stage {view.stage}, source {view.source}, epoch {view.epoch}, "
        f"row {view.source_row:,} of the source"
    )
    more = f"... and {rest:,} more documents in this row" if rest > 0 else ""
    return part("row", title, pieces, more)


def _shortened(piece: DocumentView, tokenizer: TokenizerSpec) -> list[tuple[str, bool]]:
    """Return a text, or its beginning and its end: what stands at a document's borders."""
    if len(piece.text) <= SHOWN_TEXT:
        return trained_runs(piece, tokenizer)
    half = SHOWN_TEXT // 2
    return [
        *trained_runs(piece, tokenizer, 0, half),
        (f"\n[... {len(piece.text) - 2 * half:,} characters ...]\n", False),
        *trained_runs(piece, tokenizer, len(piece.text) - half),
    ]


TREE_NODES = 200  # of each stage
SHOWN = 24
"""Sources with a bar or a colour of their own: those drawn most; the rest is one more."""


def largest(lock: Lock, most: int = SHOWN) -> list[int]:
    """Return the indices of the sources drawn most in the whole run, at most so many."""
    drawn = [*map(lock.rows_drawn, range(len(lock.sources)))]
    return sorted(range(len(drawn)), key=lambda i: (-drawn[i], i))[:most]


def source_colour(lock: Lock, name: str) -> str:
    """Return the colour of a source, the same in every picture; grey for what is no source."""
    names = [source.name for source in lock.sources]
    return COLOURS[names.index(name) % len(COLOURS)] if name in names else "#9aa3af"


def tree_section(lock: Lock) -> str:
    """Return the groups and sources of each stage with the shares wanted, compiled and drawn."""
    parts = []
    for stage in tree(lock):
        nodes = list(walk(stage.members))
        title = f"{stage.name}: {stage.tokens:,} tokens"
        lines = [_line(lock, depth, node) for depth, node in nodes[:TREE_NODES]]
        parts.append(part("stage", title, lines))
        if len(nodes) > TREE_NODES:
            parts.append(note(f"... and {len(nodes) - TREE_NODES:,} more: olm-data mix --tree"))
    return section("Mixture", joined(parts))


def _line(lock: Lock, depth: int, node: TreeNode) -> dict[str, Any]:
    shares = (node.share_wanted, node.share_compiled, node.share_got)
    return {
        "depth": depth,
        "name": node.name,
        "group": node.epochs is None,
        "colour": source_colour(lock, node.name),
        "shares": [100 * share for share in shares],
        "tokens": f"{node.rows * lock.sequence_length:,}",
        "epochs": f"{node.epochs:.4f}" if node.epochs is not None else "",
    }


def stages_section(lock: Lock) -> str:
    """Return the run as a strip over its tokens: each stage as wide as it is long."""
    chosen, stages = largest(lock), lock.manifest_stages
    lengths = dict(zip((s.name for s in lock.stages), lock.sequence_lengths, strict=True))
    seen = [lengths[stage.name] for stage in stages]
    length = lock.sequence_length
    edges = np.cumsum([0, *(stage.rows * length for stage in stages)])
    parts = np.cumsum([0, *(part.rows * length for part in lock.stages)])  # a ramp has many
    shares = np.array(
        [[part.rows_by_source[i] / part.rows for part in lock.stages] for i in chosen]
    )  # [sources, parts]
    names = [lock.sources[i].name for i in chosen]
    if len(chosen) < len(lock.sources):
        shares = np.vstack([shares, 1 - shares.sum(0)])
        names.append(f"{len(lock.sources) - len(chosen):,} more")

    def draw(axes: Axes) -> None:
        bottom = np.zeros(len(lock.stages))
        for name, share in zip(names, 100 * shares, strict=True):
            style: dict[str, Any] = {
                "color": source_colour(lock, name),
                "edgecolor": "white",
                "linewidth": 0.4,
            }
            axes.bar(parts[:-1], share, np.diff(parts), bottom, label=name, align="edge", **style)
            bottom += share
        for stage, low, high in zip(stages, edges, edges[1:], strict=False):
            axes.text((low + high) / 2, 102, stage.name, ha="center", va="bottom", fontsize=8)
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_formatter(lambda value, _: scaled(value))
        axes.set_xlabel("tokens of the run")
        axes.set_ylabel("share of tokens, %")
        axes.grid(visible=False)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)

    head = ("stage", "from token", "to token", "rows", "sequence length", "block of slots")
    rows = [
        (stage.name, *(f"{n:,}" for n in (low, high, stage.rows, size, stage.parts[0].block)))
        for stage, size, low, high in zip(stages, seen, edges, edges[1:], strict=False)
    ]
    alt = "Share of each source in each stage: " + ", ".join(stage.name for stage in stages[:SHOWN])
    picture = svg(draw, alt, height=max(2.6, 0.9 + 0.2 * len(names)))
    return section("Stages over the run", picture + table(head, rows, numbers=5))


_DRAWN = ("source", "tokens_available", "tokens=tokens drawn", "epochs", "max_epochs")


def epochs_section(lock: Lock) -> str:
    """Return how often each source is seen, by stage, and the most the manifest allows."""
    chosen, stages, drawn = largest(lock), lock.manifest_stages, summarise(lock).sources
    names = [lock.sources[i].name for i in chosen]
    limits = [drawn[i].max_epochs for i in chosen]
    epochs = np.array(
        [[lock.sources[i].epochs(stage.rows_by_source[i]) for i in chosen] for stage in stages]
    )  # [stages, sources]

    def draw(axes: Axes) -> None:
        heights = np.arange(len(names))
        left = np.zeros(len(names))
        for colour, stage, seen in zip(colours(), stages, epochs, strict=False):
            axes.barh(heights, seen, 0.6, left, color=colour, label=stage.name)
            left += seen
        for y, limit in zip(heights, limits, strict=True):
            axes.plot([limit, limit], [y - 0.4, y + 0.4], color="#888", linewidth=1.5)
        axes.set_yticks(heights, names)
        axes.invert_yaxis()
        axes.set_xlabel("epochs (grey mark: max_epochs)")
        axes.grid(visible=False, axis="y")
        if len(stages) > 1:
            axes.legend(frameon=False, fontsize=8)

    rest = len(lock.sources) - len(chosen)
    more = note(f"The {len(chosen):,} sources drawn most; {rest:,} more.") if rest else ""
    alt = f"Epochs of {len(names):,} sources by stage; the table below has the numbers"
    picture = svg(draw, alt, height=1.0 + 0.28 * len(names))
    return section(
        "Epochs of each source", picture + fields([drawn[i] for i in chosen], *_DRAWN) + more
    )
