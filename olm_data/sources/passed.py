"""What lies among the inputs and is not read: by name and reason, in every place a user looks.

    listing -> [Passed] -> passed_lines (before the work, in the result, in `stats`)
                        -> PassedCount -> manifest.json, `tools.passed_over` (informational)

Never: decides what is read (see `listing`), or keeps more than the first names of each reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from olm_data.bounded_json import MalformedJson, decode
from olm_data.errors import InputError, printable

PASSED_REASONS: dict[str, str] = {
    "format": "the name tells no format that is read",
    "about": "it tells about the records beside it, as README and LICENSE do",
    "hidden": "its name begins with a dot",
    "empty": "it holds no bytes",
    "link": "a link to a folder is not followed",
    "special": "a pipe, a socket or a device",
    "metadata": "it describes a saved dataset and holds no documents",
    "unlisted": "state.json of the saved dataset does not name it",
    "folder": "the pattern does not descend into it",
    "dataset": "a file of a dataset of olm-data",
    "sidecar": "the token file that it describes is not here",
    "size": "it is too short or too long for a document of pylib",
    "copy": "another file of pylib has the same text",
}
"""Why something is passed over; the order of the lines."""

NAMES_KEPT = 20
NAMES_SHOWN = 3
_LONGEST_NAME = 500


@dataclass(frozen=True, slots=True)
class Passed:
    """A file, or a folder (its name ends with "/"), that is not read.

    Attributes:
        path: its name for people, relative to where the argument that holds it lies.
        reason: a key of `PASSED_REASONS`.
    """

    path: str
    reason: str


class PassedCount(msgspec.Struct, frozen=True):
    """How many were passed over for one reason, and the first of their names."""

    count: int
    names: list[str]


def tally(passed: Iterable[Passed]) -> dict[str, PassedCount]:
    """Return reason -> how many and which, in the order of `PASSED_REASONS`."""
    names: dict[str, list[str]] = {}
    for item in passed:
        names.setdefault(item.reason, []).append(item.path)
    return {
        reason: PassedCount(len(names[reason]), sorted(map(_kept, names[reason]))[:NAMES_KEPT])
        for reason in PASSED_REASONS
        if reason in names
    }


def merged(
    one: Mapping[str, PassedCount], other: Mapping[str, PassedCount]
) -> dict[str, PassedCount]:
    """Return the sums of two counts."""
    none = PassedCount(0, [])
    return {
        reason: PassedCount(
            one.get(reason, none).count + other.get(reason, none).count,
            [*one.get(reason, none).names, *other.get(reason, none).names][:NAMES_KEPT],
        )
        for reason in PASSED_REASONS
        if reason in one or reason in other
    }


def to_tools(counted: Mapping[str, PassedCount]) -> dict[str, str]:
    """Return what a manifest keeps of it, in its informational part: JSON; {} for nothing."""
    return {"passed_over": msgspec.json.encode(counted).decode()} if counted else {}


def from_tools(tools: Mapping[str, str]) -> dict[str, PassedCount]:
    """Return what `to_tools` kept; {} where it is missing, damaged or not ours."""
    try:
        found = decode(tools.get("passed_over", "{}").encode(), dict[str, PassedCount])
    except (MalformedJson, UnicodeError):
        return {}
    return merged(found, {})


def passed_lines(counted: Mapping[str, PassedCount]) -> list[str]:
    """Return a line for each reason: how many, why, and the first names."""
    lines = []
    for reason, found in counted.items():
        shown = [printable(name) for name in found.names[:NAMES_SHOWN]]
        more = found.count - len(shown)
        names = ", ".join(shown) + (f" and {more:,} more" if more > 0 else "")
        lines.append(f"{found.count:,} {reason} ({PASSED_REASONS[reason]}): {names}")
    return lines


def passed_json(counted: Mapping[str, PassedCount]) -> dict[str, Any]:
    """Return it as a JSON object."""
    return {name: {"count": item.count, "names": item.names} for name, item in counted.items()}


def refuse_passed(passed: Iterable[Passed]) -> None:
    """Refuse inputs among which something is not read.

    Raises:
        InputError: something is; names it.
    """
    counted = tally(passed)
    if counted:
        total = sum(item.count for item in counted.values())
        raise InputError(
            f"{total:,} file{'s' * (total != 1)} among the inputs would not be read",
            where="--strict-inputs",
            why="\n    " + "\n    ".join(passed_lines(counted)),
            fix="name the files to read one by one or by a pattern, or leave out --strict-inputs",
        )


def _kept(name: str) -> str:
    """Return a name as JSON can hold it."""
    return printable(name)[:_LONGEST_NAME]
