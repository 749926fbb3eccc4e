"""Logs with a JSON object a line, as runs write them: read a line at a time, within bounds.

    metrics.jsonl, starts.jsonl -> json_lines -> (number, object) of each whole line
                                        `-> LogEnd: whether the last line was cut off

A last line without its end is one that is being written, or was when the machine failed: it is left
out, and who reads says so. Never: read a log as a whole, or a line without a limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olm_data.bounded_json import MalformedJson, decode_object
from olm_data.errors import ValidationError
from olm_data.regular_files import open_regular

MAX_LINE = 16 << 20
"""Bytes of a line."""


@dataclass
class LogEnd:
    """How a log ended.

    Attributes:
        torn: bytes of a last line without its end; 0 where the log is whole.
    """

    torn: int = 0

    def note(self, path: Path) -> list[str]:
        """Return what to tell of it: a line, or none."""
        if not self.torn:
            return []
        return [
            f"the last line of {path} is cut off after {self.torn:,} bytes and left out: "
            "it was being written"
        ]


def raw_lines(path: Path, end: LogEnd | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each whole line of a log.

    Args:
        end: is told how the log ended.

    Raises:
        FileNotFoundError: there is no such file.
        ValidationError: it is no regular file, or a line is longer than any that is written.
    """
    with open_regular(path) as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if line.endswith(b"\n"):
                yield number, line
            elif len(line) == MAX_LINE:
                raise malformed_log(path, f"line {number} is longer than {MAX_LINE:,} bytes")
            elif end is not None:
                end.torn = len(line)


def json_lines(path: Path, end: LogEnd | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number, from 1, and the object of each whole line of a log.

    Raises as `raw_lines`, and ValidationError for a line that is no JSON object within bounds.
    """
    for number, line in raw_lines(path, end):
        try:
            yield number, decode_object(line)
        except MalformedJson as error:
            raise malformed_log(path, f"line {number}: {error}") from None


def malformed_log(path: Path, why: str) -> ValidationError:
    """Return the error for a file of a run that is not what a run writes."""
    return ValidationError(
        "a file of the run is malformed", where=str(path), why=why, fix="restore it from a copy"
    )
