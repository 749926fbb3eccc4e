"""What every command shares: how much it says beside its result, and the options for that.

    -q   the result, warnings and errors            standard error stays empty where all is well
         also progress, notes, what to type next
    -v   also each step with its time, and what the whole command took

A result is printed by `click.echo`, as JSON by `print_json`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from olm_data.command import say
from olm_data.errors import UsageError, shown

if TYPE_CHECKING:
    from olm_data.progress import Progress

QUIET = "olm_data.quiet"


def quiet() -> bool:
    """Return whether the running command was asked to say no more than its result."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(QUIET))


def note(text: str) -> None:
    """Print a remark to standard error, unless `-q` was given."""
    if not quiet():
        say(text)


def warn(text: str) -> None:
    """Print a warning to standard error, whatever was asked for."""
    say(f"warning: {text}")


def print_json(result: object) -> None:
    """Print the result of a command as one JSON value.

    Args:
        result: a Struct or dataclass, a list of them, or an object of them; an iterator becomes a
            list.
    """
    import msgspec

    click.echo(json.dumps(msgspec.to_builtins(result, enc_hook=_listed), indent=1))


def _listed(value: object) -> object:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value)} is not for JSON")


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


def _be_quiet(context: click.Context, _: click.Parameter, given: bool) -> None:
    if given:
        context.meta[QUIET] = True


def _be_verbose(context: click.Context, _: click.Parameter, given: bool) -> None:
    if not given:
        return
    if context.meta.get(QUIET):
        raise click.UsageError("-q and -v contradict each other", context)
    start = time.monotonic()
    handler = logging.StreamHandler()
    handler.setFormatter(_Elapsed(start))
    log = logging.getLogger("olm_data")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)

    def end() -> None:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
        own, children = (resource.getrusage(who) for who in _WHO)
        cpu = sum(use.ru_utime + use.ru_stime for use in (own, children))
        most = max(own.ru_maxrss, children.ru_maxrss) / 1024
        seconds = time.monotonic() - start
        click.echo(f"took {seconds:.1f} s, {cpu:.1f} s of CPU, {most:,.0f} MiB at most", err=True)

    context.call_on_close(end)


_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


class _Elapsed(logging.Formatter):
    def __init__(self, start: float) -> None:
        super().__init__()
        self._start = start

    def format(self, record: logging.LogRecord) -> str:

        return f"{time.monotonic() - self._start:8.2f} s  {shown(record.getMessage())}"


def _flag(*names: str, help: str, then: Callable[..., None] | None = None) -> click.Option:
    return click.Option(
        names, is_flag=True, expose_value=False, is_eager=True, help=help, callback=then
    )


def with_common_options(command: click.Command) -> click.Command:
    """Add what every command takes: -q, -v, --debug, and -o for its --output."""
    if isinstance(command, click.Group):
        for one in command.commands.values():
            with_common_options(one)
    if any(parameter.name == "quiet" for parameter in command.params):
        return command  # it was named before in this process
    for parameter in command.params:
        if "--output" in parameter.opts and "-o" not in parameter.opts:
            parameter.opts.insert(0, "-o")
    command.params += [
        _flag("-q", "--quiet", help="Print only the result and warnings.", then=_be_quiet),
        _flag("-v", "--verbose", help="Print each step and what it took.", then=_be_verbose),
        _flag("--debug", help="Show the traceback of an error."),  # read in `main`
    ]
    return command
