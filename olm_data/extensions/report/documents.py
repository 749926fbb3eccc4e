"""How long the documents of a mixture's sources are, from the ends of some of their shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.extensions.report.mixture import largest, source_colour
from olm_data.mixture.lock import Lock
from olm_data.page import joined, note, section, svg, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLE_SOURCES = 8  # each has a colour of its own
SAMPLE_SHARDS = 16  # lengths are drawn from at most this many shards a source, evenly spread


def length_section(lock: Lock, datasets: Sequence[Dataset]) -> str:
    """Return a histogram of the tokens by the length of their document, one a source."""
    lengths: dict[str, np.ndarray] = {}
    rows, partial = [], False
    for index in sorted(largest(lock, SAMPLE_SOURCES)):
        source, dataset = lock.sources[index], datasets[index]
        shards = len(dataset.manifest.shards)
        chosen = sorted({i * shards // SAMPLE_SHARDS for i in range(SAMPLE_SHARDS)})
        partial |= len(chosen) < shards
        ends = [dataset.shard(i).ends.astype(np.int64) for i in chosen]
        sample = np.concatenate([np.diff(e, prepend=0) for e in ends])
        lengths[source.name] = sample
        low, middle, high = np.percentile(sample, [10, 50, 90])
        rows.append(
            (
                source.name,
                f"{dataset.documents:,}",
                f"{dataset.tokens / dataset.documents:,.0f}",
                f"{low:,.0f}",
                f"{middle:,.0f}",
                f"{high:,.0f}",
                f"{sample.max():,}",
                f"{100 * np.mean(sample > lock.sequence_length):.1f} %",
            )
        )
    shortest = min(int(sample.min()) for sample in lengths.values())
    longest = max(int(sample.max()) for sample in lengths.values())
    bins = np.geomspace(shortest, longest + 1, 60)

    def draw(axes: Axes) -> None:
        for name, sample in lengths.items():
            colour = source_colour(lock, name)
            share, _ = np.histogram(sample, bins, weights=sample / sample.sum())
            axes.stairs(100 * share, bins, fill=True, alpha=0.35, color=colour)
            axes.stairs(100 * share, bins, color=colour, label=name)
        axes.axvline(lock.sequence_length, color="#888", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel("document length, tokens (dotted: sequence length)")
        axes.set_ylabel("share of the source's tokens, %")
        axes.legend(frameon=False)

    alt = f"Histogram of tokens by the length of their document, {shortest:,} to {longest:,} tokens"
    head = ("source", "documents", "mean", "10 %", "median", "90 %", "longest", "longer than a row")
    parts = [svg(draw, alt), table(head, rows, numbers=7)]
    if partial:
        parts.append(note(f"Of {SAMPLE_SHARDS} shards a source, evenly spread."))
    if len(lengths) < len(lock.sources):
        parts.append(note(f"Of the {len(lengths)} sources drawn most, of {len(lock.sources):,}."))
    return section("Document lengths", joined(parts))
