"""Tables on the terminal: one look for all commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

WITHOUT_TERMINAL = 140


def table(head: Sequence[str], *, names: int = 1, title: str | None = None) -> Table:
    """Return a table to add rows to: the first columns are names, the others stand at the right."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(head):
        made.add_column(name, justify="left" if number < names else "right", overflow="fold")
    return made


def console() -> Console:
    """Return a console on standard output, of a fixed width where that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else WITHOUT_TERMINAL)
