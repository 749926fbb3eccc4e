"""How each start of a run ended: a line each in `ends.jsonl`. Read and written here only.

    {"step": 156, "time": 1767225900.5, "reason": "finished"}
    {"step": 40, "time": 1767225700.25, "reason": "cancelled", "by": "stop file", "why": "too slow"}

A start without an end was killed without a word, or goes on: its process wrote no line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.run_log.lines import append_line, malformed_log, read_lines
from olm_data.run_log.log import STARTS, Start, Time
from olm_data.storage.store import Store

T = TypeVar("T")

ENDS = "ends.jsonl"

Reason = Literal["finished", "stopped", "cancelled", "failed"]


class End(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """An end of a run, one line of `ends.jsonl`.

    Attributes:
        step: the last step that was taken.
        time: when it was, seconds since 1970, UTC.
        reason: `finished` after the last step; `stopped` to be gone on with, by a signal or the
            time limit; `cancelled` to stay as it is; `failed` by an error. A run that goes back
            for a bad step fails and starts again.
        by: the signal, who cancelled, or the kind of the error; "" where it finished.
        why: what was said, without credentials.
    """

    step: Size
    time: Time = 0.0
    reason: Reason
    by: str = ""
    why: str = ""
    version: Literal[1] = 1


def read_ends(folder: Path, notes: list[str] | None = None) -> list[End]:
    """Return the ends of a run, oldest first; none where there is no such file.

    Args:
        notes: takes a remark on a last line that is cut off.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    return read_lines(folder / ENDS, End, notes)


def append_end(folder: Path, end: End) -> None:
    """Add a line to `ends.jsonl`, atomically; a last line that is cut off goes."""
    append_line(folder / ENDS, msgspec.json.encode(end))


def is_over(run: Store) -> bool:
    """Whether the last start of a run, local or remote, finished or was cancelled.

    One that was stopped or failed goes on when it is started again; so may one without an end.

    Raises:
        ValidationError: a last line is not what a run writes.
        StorageError: the store cannot be read.
    """
    end, start = _last(run, ENDS, End), _last(run, STARTS, Start)
    over = end is not None and end.reason in ("finished", "cancelled")
    return over and (start is None or end is None or end.time >= start.time)


def _last(run: Store, name: str, kind: type[T]) -> T | None:
    """Return what the last whole line of a file says; None: there is none."""
    try:
        whole = run.read(name).rpartition(b"\n")[0]
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return decode(whole.rpartition(b"\n")[2], kind) if whole else None
    except MalformedJson as error:
        raise malformed_log(Path(run.url(name)), str(error)) from None
