"""Errors a user can act on: what went wrong, where, why it matters and what to type next.

Every error the command line is expected to meet is an `OlmError` with an exit code. Anything else
that reaches the command line is a defect and exits with 1.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from fractions import Fraction


class OlmError(Exception):
    """Base of all errors with a message for the user.

    Args:
        what: one sentence saying what is wrong.
        where: the file, line, row or option it is wrong at.
        why: what would go wrong if it were ignored, if that is not obvious.
        fix: what to type or change next.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [_one_line(self.what)]
        lines += [
            f"  {label}: {_one_line(text)}"
            for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix))
            if text
        ]
        return "\n".join(lines)

    def __reduce__(self):  # type: ignore[no-untyped-def]  # keeps the parts across processes
        return _rebuild, (type(self), self.what, self.where, self.why, self.fix)


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
    """Return `text` with its line breaks escaped, but for those of an indented list."""
    return re.sub(r"\n(?! {4})", r"\\n", text)


def _rebuild(
    kind: type[OlmError], what: str, where: str | None, why: str | None, fix: str | None
) -> OlmError:
    return kind(what, where=where, why=why, fix=fix)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a sentence naming the nearest of `known` to `name`, or listing them all."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(choices)}" if choices else "nothing is known here"


def printable(text: str) -> str:
    """Return `text` with control characters and line breaks escaped: data cannot forge output."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(value: object) -> str:
    """Return a value that somebody gave as a message shows it."""
    if isinstance(value, Fraction):
        return f"{float(value):g}"
    return repr(value) if not isinstance(value, str) else f"'{printable(value[:80])}'"


_SECRET_QUERY = re.compile(
    r"([?&;](?:x-amz-[a-z-]+|awsaccesskeyid|signature|sig|token|[a-z_-]*secret[a-z_-]*|password"
    r"|access[_-]?key[a-z_-]*|key)=)[^&;\s\"'<>]+",
    re.IGNORECASE,
)
_SECRET_USER = re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s@\"'<>]+@", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(?:^|_)(?:SECRET|TOKEN|PASSWORD|API_KEY)(?:_|$)")
_SHORTEST_SECRET = 8  # a shorter value would blot out ordinary words


def redacted(text: str) -> str:
    """Return `text` without credentials: of URLs, presigned queries, and the environment."""
    text = _SECRET_USER.sub(r"\1***@", text)
    text = _SECRET_QUERY.sub(r"\1***", text)
    for name, value in os.environ.items():
        if (
            len(value) >= _SHORTEST_SECRET
            and value in text  # the cheap and unlikely one first: a lock asks for each source
            and _SECRET_VARIABLE.search(name.upper())
            and not os.path.exists(value)
        ):
            text = text.replace(value, "***")
    return text


def shown(text: str) -> str:
    """Return a message of several lines for the terminal: no escape of it acts, no secret shows."""
    return "\n".join(printable(line) for line in redacted(text).split("\n"))


def refuse_secrets(url: str) -> None:
    """Refuse a URL that holds credentials: it would end in plans, manifests and logs.

    Raises:
        UsageError: user and password before the host, or a query.
    """
    if "://" not in url:
        return
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    if "@" in host or redacted(url) != url:
        raise UsageError(
            "a URL must not hold credentials",
            where=f"{scheme}://...",
            why="it would be written into plans, manifests and logs",
            fix="put them in the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",
        )
