"""What lies among the inputs and is not read: by name and reason, in every place a user looks.

listing -> [Passed] -> passed_lines (before the work, in the result, in `stats`)
                    -> PassedCount -> `Tools.passed_over` in manifest.json (informational)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from olm_data.dataset.tools import NAMES_KEPT, PASSED_REASONS, PassedCount
from olm_data.errors import InputError, printable

NAMES_SHOWN = 3
_LONGEST_NAME = 500


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file, or a folder (its name ends with "/"), that is not read.

    Attributes:
        path: its name for people, relative to where the argument that holds it lies.
        reason: a key of `PASSED_REASONS`.
    """

    path: str
    reason: str


def tally(passed: Iterable[SkippedFile]) -> dict[str, PassedCount]:
    """Return reason -> how many and which, in the order of `PASSED_REASONS`."""
    names: dict[str, list[str]] = {}
    for item in passed:
        names.setdefault(item.reason, []).append(printable(item.path)[:_LONGEST_NAME])
    return {
        reason: PassedCount(len(names[reason]), sorted(names[reason])[:NAMES_KEPT])
        for reason in PASSED_REASONS
        if reason in names
    }


def passed_lines(counted: Mapping[str, PassedCount]) -> list[str]:
    """Return a line for each reason: how many, why, and the first names."""
    lines = []
    for reason, found in counted.items():
        shown = [printable(name) for name in found.names[:NAMES_SHOWN]]
        more = found.count - len(shown)
        names = ", ".join(shown) + (f" and {more:,} more" if more > 0 else "")
        lines.append(f"{found.count:,} {reason} ({PASSED_REASONS[reason]}): {names}")
    return lines


def refuse_passed(counted: Mapping[str, PassedCount]) -> None:
    """Refuse inputs among which something is not read.

    Raises:
        InputError: something is; names it.
    """
    if counted:
        total = sum(item.count for item in counted.values())
        raise InputError(
            f"{total:,} file{'s' * (total != 1)} among the inputs would not be read:\n    "
            + "\n    ".join(passed_lines(counted)),
            where="--strict-inputs",
            fix="name the files to read one by one or by a pattern, or leave out --strict-inputs",
        )
