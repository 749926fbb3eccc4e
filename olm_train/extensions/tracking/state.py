"""`tracking.json` of a run folder: what each tracker calls the run, and how far it has come.

    {"version": 1, "trackers": {"wandb": {"key": "x1y2z3", "step": 120, "lines": 2}}}

Read and written here only. Never: how far a tracker is beyond what it has surely taken.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Literal

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.regular_files import read_regular
from olm_data.run_log.lines import malformed_log, replace_file

TRACKING = "tracking.json"

_writing = threading.Lock()
"""The trackers of a run have a thread each, and this one file."""


class TrackerCursor(msgspec.Struct, frozen=True):
    """An evaluation made beside the run that a tracker has.

    Attributes:
        time: of the file it was read from.
        at: the last step that the tracker had by then; it goes with later ones.
    """

    time: float
    at: Size


class TrackerState(msgspec.Struct, frozen=True, kw_only=True):
    """A run on a tracker.

    Attributes:
        key: what the tracker calls it.
        step: the last step that it has taken.
        lines: lines of the log that it has of that step; a late evaluation adds one.
        keep: the run went back to this step, and the later ones of the tracker are still to be
            removed; None: nothing is.
        watched: evaluations made beside the run that it has, by file name.
    """

    key: str
    step: Size = 0
    lines: Size = 0
    keep: Size | None = None
    watched: dict[str, TrackerCursor] = {}  # msgspec gives each its own


class _File(msgspec.Struct, frozen=True, kw_only=True):
    trackers: dict[str, TrackerState] = {}
    version: Literal[1] = 1


def read_tracked(folder: Path, tracker: str) -> TrackerState | None:
    """Read what a tracker has of the run in a folder; None: nothing.

    Raises:
        ValidationError: the file is malformed.
    """
    return _read(folder).trackers.get(tracker)


def write_tracked(folder: Path, tracker: str, tracked: TrackerState) -> None:
    """Write it, durably.

    Raises:
        OSError: the disk refuses.
    """
    with _writing:
        trackers = {**_read(folder).trackers, tracker: tracked}
        plain = msgspec.to_builtins(_File(trackers=trackers))
        replace_file(folder / TRACKING, json.dumps(plain, indent=1).encode() + b"\n")


def _read(folder: Path) -> _File:
    path = folder / TRACKING
    try:
        return decode(read_regular(path), _File)
    except FileNotFoundError:
        return _File()
    except MalformedJson as error:
        raise malformed_log(path, str(error)) from None
