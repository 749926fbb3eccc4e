"""Tables on the terminal: one look for all commands."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WITHOUT_TERMINAL = 140
LEAST_NAME, MOST_NAME = 12, 60
"""Cells of a terminal that a name is cut to."""


class _WholeCells(Table):
    """A table that becomes a block of lines a row where its cells would be broken to fit."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbroken = options.update(width=1 << 16)
        if Measurement.get(console, unbroken, self).maximum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), "bold")
        _, *heads = (str(column.header) for column in self.columns)
        for name, *cells in zip(*(column.cells for column in self.columns), strict=True):
            yield name
            block = Table.grid(padding=(0, 2), pad_edge=True)
            block.add_column(no_wrap=True)
            block.add_column(overflow="fold")
            for head, cell in zip(heads, cells, strict=True):
                if cell:
                    block.add_row(head, cell)
            yield block


def table(head: Sequence[str], *, names: int = 1, title: str | None = None) -> Table:
    """Return a table to add rows to: the first columns are names, the others stand at the right."""
    made = _WholeCells(title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(head):
        made.add_column(name, justify="left" if number < names else "right", overflow="fold")
    return made


def console() -> Console:
    """Return a console on standard output, of a fixed width where that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else WITHOUT_TERMINAL)


def aligned(
    rows: Sequence[Sequence[str]], width: int | None = None, *, left: Collection[int] = (0,)
) -> list[str]:
    """Return rows of cells as lines without borders.

    Args:
        width: of the lines, about: the middle of a long first cell is left out. None: no limit.
        left: columns that stand at the left; the others stand at the right.
    """
    if not rows:
        return []
    sizes = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        room = width - sum(sizes[1:]) - 2 * len(sizes[1:])
        sizes[0] = min(sizes[0], max(LEAST_NAME, min(room, MOST_NAME)))
    lines = []
    for first, *others in rows:
        cells = []
        for number, (text, size) in enumerate(
            zip((shortened(first, sizes[0]), *others), sizes, strict=True)
        ):
            blank = " " * (size - cell_len(text))
            cells.append(text + blank if number in left else blank + text)
        lines.append("  ".join(cells).rstrip())
    return lines


def shortened(text: str, width: int) -> str:
    """Return text cut in its middle to at most `width` cells of a terminal."""
    if cell_len(text) <= width:
        return text
    left = (width - 1) // 2
    right = set_cell_size(text[::-1], width - 1 - left)[::-1]  # cells from the end
    return f"{set_cell_size(text, left)}\u2026{right}"


def shortened_end(text: str, width: int) -> str:
    """Return text cut at its end to at most `width` cells of a terminal."""
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)) + "\u2026"
