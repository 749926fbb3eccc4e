"""What every command shares: how much it says beside its result, and the options for that.

    -q   the result, warnings and errors            standard error stays empty where all is well
         also progress, notes, what to type next
    -v   also each step with its time, and what the whole command took

A result is printed by `printing.emit`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from olm_data.command import quiet
from olm_data.command import say as note
from olm_data.errors import UsageError

__all__ = ["note", "quiet"]  # said to others, too

if TYPE_CHECKING:
    from olm_data.progress import Progress


def warn(text: str) -> None:
    """Print a warning to standard error, whatever was asked for."""
    note(f"warning: {text}")


def show_progress(label: str, *, as_json: bool = False) -> Progress:
    """Return a `Progress` for people, or for events on standard output; `-q` silences the first.

    Args:
        label: what is being done, one word.
        as_json: write JSON Lines instead.
    """
    from olm_data.progress import Progress

    stream = open(os.devnull, "w") if quiet() else sys.stderr  # noqa: SIM115  # ends with the process
    return Progress(label, stream=stream, events=sys.stdout if as_json else None)


def show_bytes(progress: Progress, what: str, done: int, total: int) -> None:
    """Show how many bytes are done of all.

    Args:
        what: is done with them, or how fast.
    """
    progress.update(done / max(total, 1), [what, f"{done / 1e9:,.2f} of {total / 1e9:,.2f} GB"])


def show_read(progress: Progress, read: int, total: int) -> None:
    """Show how many bytes are read of all, and how fast."""
    show_bytes(progress, f"{read / max(progress.seconds, 1e-9) / 1e6:,.0f} MB/s", read, total)


def refuse_given(names: Iterable[str], reason: str) -> None:
    """Refuse options of the running command that were typed and would have no effect.

    Args:
        names: of its parameters.
        reason: what they are for, as in `--seed is for ...`.

    Raises:
        UsageError: one of them was typed.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is ParameterSource.COMMANDLINE:
            raise UsageError(f"{max(parameter.opts, key=len)} is for {reason}", fix="leave it out")


def _use(context: click.Context, _: click.Parameter, given: tuple[str, ...]) -> None:
    if given:
        from olm_data.storage.objects import parse_options, use_options

        use_options(parse_options(given))


STORAGE_OPTIONS = click.Option(
    ["--storage-options"],
    multiple=True,
    expose_value=False,
    is_eager=True,
    metavar="KEY=VALUE|JSON",
    help="For the client of a bucket: profile=lab. May be repeated.",
    callback=_use,
)
"""What every command of olm-data takes besides."""
