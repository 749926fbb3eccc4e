"""Errors a user can act on: what went wrong, where, why it matters and what to type next.

Every error the command line is expected to meet is an `OlmError` with an exit code. Anything else
that reaches the command line is a defect and exits with 1.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable
from fractions import Fraction
from functools import partial

from olm_data.redaction import names_credentials, redacted

_MOST_FLOAT = 10**300


class OlmError(Exception):
    """Base of all errors with a message for the user; no part of it holds a credential.

    Args:
        what: one sentence saying what is wrong, after which an indented list may follow.
        where: the file, line, row or option it is wrong at; what it names may be anybody's.
        why: what would go wrong if it were ignored, if that is not obvious; as `where`.
        fix: what to type or change next.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        self.what, self.fix = redacted(what), fix and redacted(fix)
        self.where, self.why = (part and printable(redacted(part)) for part in (where, why))
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [_one_line(self.what)]
        lines += [
            f"  {label}: {_one_line(text)}"
            for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix))
            if text
        ]
        return "\n".join(lines)

    def __reduce__(self):  # type: ignore[no-untyped-def]  # keeps the parts across processes
        parts = {"where": self.where, "why": self.why, "fix": self.fix}
        return partial(type(self), self.what, **parts), ()


class UsageError(OlmError, ValueError):
    """Wrong option, configuration key or value: exit 2."""

    exit_code = 2


class ValidationError(OlmError, ValueError):
    """Bytes on disk disagree with their digest, format or promise: exit 3."""

    exit_code = 3


class InputError(OlmError, ValueError):
    """The user's text or data is refused: exit 4."""

    exit_code = 4


class ResourceError(OlmError):
    """Local disk, memory or permission: exit 5."""

    exit_code = 5


class StorageError(OlmError):
    """Remote storage or hub: exit 6."""

    exit_code = 6


class ConflictError(OlmError):
    """Somebody else writes, or wrote something else, at this place: exit 7."""

    exit_code = 7


def _one_line(text: str) -> str:
    """Return `text` on one line, but for the lines of an indented list."""
    return re.sub(r"\s*\n(?! {4})\s*", " ", text)


def nearest_of(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that is probably meant by `name`, if any is."""
    choices = sorted(known)
    same = [choice for choice in choices if choice.casefold() == name.casefold()]
    near = same or difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    return near[0] if near else None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a sentence naming the nearest of `known` to `name`, or listing them all."""
    choices = sorted(known)
    near = nearest_of(name, choices)
    if near is not None:
        return f"did you mean {near!r}?"
    return f"known: {', '.join(choices)}" if choices else "nothing is known here"


def printable(text: str) -> str:
    """Return `text` with control characters and line breaks escaped: data cannot forge output."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def typed(name: str) -> str:
    """Return a name as one types it in a shell."""
    return printable(shlex.quote(name))


def quoted(value: object) -> str:
    """Return a value that somebody gave as a message shows it."""
    if isinstance(value, Fraction):
        near = f"{float(value):g}" if abs(value) < _MOST_FLOAT else ""
        return near or f"{'-' if value < 0 else ''}1e{len(str(int(abs(value)))) - 1} or more"
    return repr(value) if not isinstance(value, str) else f"'{printable(redacted(value))[:80]}'"


def shown(text: str) -> str:
    """Return a message of several lines for the terminal: no escape of it acts, no secret shows."""
    return "\n".join(printable(line) for line in redacted(text).split("\n"))


def words(text: str, most: int = 80) -> str:
    """Return what a server says as a message may repeat it: redacted, printable, and then cut."""
    return printable(redacted(text).strip())[:most]


def said_by(error: BaseException, most: int = 300) -> str:
    """Return the first line of somebody else's error as a message may repeat it; see `words`."""
    lines = redacted(str(error)).strip().splitlines()
    return words(lines[0], most) if lines else type(error).__name__


def refuse_secrets(url: str) -> None:
    """Refuse a URL that holds credentials: it would end in plans, manifests and logs.

    Raises:
        UsageError: user and password before the host, or a query.
    """
    if "://" not in url:
        return
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    if "@" in host or names_credentials(url):
        raise UsageError(
            "a URL must not hold credentials",
            where=f"{scheme}://...",
            why="it would be written into plans, manifests and logs",
            fix="put them in the environment"
            + (": AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" if scheme == "s3" else ""),
        )
