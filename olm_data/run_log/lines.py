"""The lines of a log: read one by one within bounds, replaced as a whole.

A line ends with a line break. The last one without is being written, or was when the machine
failed: it is no line yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from olm_data.bounded_json import MalformedJson, decode
from olm_data.errors import ValidationError
from olm_data.regular_files import open_regular
from olm_data.storage.disk import write_durable

T = TypeVar("T")

MAX_LINE = 16 << 20
"""Bytes of a line."""


def lines(
    path: Path, notes: list[str] | None = None, *, offset: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each whole line of a log; none without a file.

    Args:
        offset: byte to begin at; numbers count from there.
        notes: takes a remark on a last line that is cut off.

    Raises:
        ValidationError: it is no regular file, or a line is longer than any that is written.
    """
    if not path.exists():
        return
    with open_regular(path) as file:
        file.seek(offset)
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if line.endswith(b"\n"):
                yield number, line
            elif len(line) == MAX_LINE:
                raise malformed_log(path, f"line {number} is longer than {MAX_LINE:,} bytes")
            elif notes is not None:
                notes.append(
                    f"the last line of {path} is cut off after {len(line):,} bytes and left out: "
                    "it was being written"
                )


def replace_file(path: Path, data: bytes) -> None:
    """Write a file of the run, atomically and durably.

    Raises:
        OSError: the disk refuses it; no part of it is left there.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_durable(temporary, data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def malformed_log(path: Path, why: str) -> ValidationError:
    """Return the error for a file of a run that is not what a run writes."""
    return ValidationError(
        "a file of the run is malformed", where=str(path), why=why, fix="restore it from a copy"
    )


def read_lines(path: Path, kind: type[T], notes: list[str] | None = None) -> list[T]:
    """Return the lines of a log, each of one kind; none where there is no such file.

    Args:
        notes: takes a remark on a last line that is cut off.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    found = []
    for number, line in lines(path, notes):
        try:
            found.append(decode(line, kind))
        except MalformedJson as error:
            raise malformed_log(path, f"line {number}: {error}") from None
    return found


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a log, atomically; a last line that is cut off goes."""
    before = [each for _, each in lines(path)]
    replace_file(path, b"".join([*before, line, b"\n"]))
