"""What both command lines share: groups of commands, and how a command ends that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from olm_data.errors import OlmError, UsageError, printable, shown, suggest
from olm_data.extras import missing_extra
from olm_data.sinks import print_traceback


def usage_error(error: click.ClickException, program: str) -> UsageError:
    """Return what click refuses in our style.

    Args:
        program: and the command, where click does not say which one it was.
    """
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else program
    text = error.format_message().strip()
    sentence = text[:1].lower() + text[1:].removesuffix(".")
    return UsageError(sentence, fix=f"{path} --help")


@contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Turn an error of the body that a user can act on into a message and an exit code."""
    try:
        yield
    except (OlmError, ImportError) as error:
        known = missing_extra(error) if isinstance(error, ImportError) else error
        if not isinstance(known, OlmError):
            raise
        if debug:
            print_traceback(type(error), error, error.__traceback__)
        else:
            print(f"error: {shown(str(known))}", file=sys.stderr, flush=True)
        raise SystemExit(known.exit_code) from None


class CommandGroup(click.Group):
    """A group of commands that answers an unknown name with the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            raise UsageError(
                f"there is no command {printable(args[0])!r}",
                fix=f"{self.nearest(args[0], known)} {ctx.command_path} --help lists them",
            )
        return super().resolve_command(ctx, args)

    def nearest(self, name: str, known: list[str]) -> str:
        """Return a sentence that names the command that is probably meant."""
        return suggest(name, known)
