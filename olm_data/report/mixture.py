"""What a report shows of a mixture lock: stages over tokens, and how often each source is seen.

Everything is computed from the lock alone, so it says what training will do, not what was asked.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from olm_data.mixture.lock import Lock
from olm_data.page import COLOURS, colours, note, section, svg, table
from olm_data.progress import scaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 24
"""Sources with a bar or a colour of their own: those drawn most; the rest is one more."""


def largest(lock: Lock, most: int = SHOWN) -> list[int]:
    """Return the indices of the sources drawn most in the whole run, at most so many."""
    drawn = [
        sum(stage.rows_by_source[i] for stage in lock.stages) for i in range(len(lock.sources))
    ]
    return sorted(range(len(drawn)), key=lambda i: (-drawn[i], i))[:most]


def source_colour(lock: Lock, name: str) -> str:
    """Return the colour of a source, the same in every picture; grey for what is no source."""
    names = [source.name for source in lock.sources]
    return COLOURS[names.index(name) % len(COLOURS)] if name in names else "#9aa3af"


def stages_section(lock: Lock) -> str:
    """Return the run as a strip over its tokens: each stage as wide as it is long."""
    chosen = largest(lock)
    length = lock.sequence_length
    edges = np.cumsum([0, *(stage.rows * length for stage in lock.stages)])
    shares = np.array(
        [[stage.rows_by_source[i] / stage.rows for stage in lock.stages] for i in chosen]
    )  # [sources, stages]
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
            axes.bar(edges[:-1], share, np.diff(edges), bottom, label=name, align="edge", **style)
            bottom += share
        for stage, low, high in zip(lock.stages, edges, edges[1:], strict=False):
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
        (
            stage.name,
            f"{low:,}",
            f"{high:,}",
            f"{stage.rows:,}",
            f"{seen:,}",
            f"{stage.block:,}",
        )
        for stage, seen, low, high in zip(
            lock.stages, lock.sequence_lengths, edges, edges[1:], strict=False
        )
    ]
    picture = svg(draw, height=max(2.6, 0.9 + 0.2 * len(names)))
    return section("Stages over the run", picture + table(head, rows, numbers=5))


def epochs_section(lock: Lock) -> str:
    """Return how often each source is seen, by stage, and the most the manifest allows."""
    chosen = largest(lock)
    names = [lock.sources[i].name for i in chosen]
    limits = [float(Fraction(lock.sources[i].max_epochs)) for i in chosen]
    epochs = np.array(
        [[stage.rows_by_source[i] / lock.sources[i].rows for i in chosen] for stage in lock.stages]
    )  # [stages, sources]

    def draw(axes: Axes) -> None:
        place = np.arange(len(names))
        left = np.zeros(len(names))
        for colour, stage, seen in zip(colours(), lock.stages, epochs, strict=False):
            axes.barh(place, seen, 0.6, left, color=colour, label=stage.name)
            left += seen
        for y, limit in zip(place, limits, strict=True):
            axes.plot([limit, limit], [y - 0.4, y + 0.4], color="#888", linewidth=1.5)
        axes.set_yticks(place, names)
        axes.invert_yaxis()
        axes.set_xlabel("epochs (grey mark: max_epochs)")
        axes.grid(visible=False, axis="y")
        if len(lock.stages) > 1:
            axes.legend(frameon=False, fontsize=8)

    head = ("source", "tokens available", "tokens drawn", "epochs", "max_epochs")
    rows = [
        (
            lock.sources[i].name,
            f"{lock.sources[i].tokens:,}",
            f"{sum(s.rows_by_source[i] for s in lock.stages) * lock.sequence_length:,}",
            f"{seen:.4f}",
            f"{limit:g}",
        )
        for i, seen, limit in zip(chosen, epochs.sum(0), limits, strict=True)
    ]
    rest = len(lock.sources) - len(chosen)
    more = note(f"The {len(chosen):,} sources drawn most; {rest:,} more.") if rest else ""
    picture = svg(draw, height=1.0 + 0.28 * len(names))
    return section("Epochs of each source", picture + table(head, rows, numbers=4) + more)
