"""What happened to a run, in the order in which it did, and how it is now.

starts, ends, spike and bad steps, checkpoints -> Event, ...; Status
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from olm_data.counts import duration
from olm_data.errors import OlmError, shown
from olm_data.run_log.log import End, Start
from olm_data.run_log.run_folder import BadStep, bad_step_files

MOST_EVENTS = 400
MOST_NAMED = 3
"""Documents that a line names."""
SILENT = 300.0
"""Seconds without a line after which a run is called silent."""
MOST_CHANGES = 3

_CHECKPOINT = re.compile(r"step([0-9]{1,18})")


class Event(msgspec.Struct, frozen=True):
    """Something that happened after a step; `time` is 0 where it is not known."""

    kind: Literal["start", "end", "spike", "bad", "checkpoint"]
    step: int
    time: float
    text: str


class Status(msgspec.Struct, frozen=True):
    """How a run is: a word, and more of it."""

    word: Literal["running", "silent", "finished", "stopped", "cancelled", "failed"]
    text: str


def status(starts: Sequence[Start], ends: Sequence[End], last: float, now: float) -> Status:
    """Return how a run is.

    Args:
        last: when its last line was written.
        now: seconds since 1970.
    """
    started = starts[-1].time if starts else 0.0
    if ends and ends[-1].time >= started:
        return Status(ends[-1].reason, _ended(ends[-1]))
    quiet = now - max(last, started)
    if quiet > SILENT:
        return Status("silent", f"no line for {duration(quiet)}, and no word of an end")
    return Status("running", "")


def events(
    folder: Path, starts: Sequence[Start], ends: Sequence[End], notes: list[str]
) -> tuple[list[Event], int]:
    """Return the latest events of a run, by step, and how many earlier ones there are.

    Args:
        notes: takes a remark on each file that cannot be read.
    """
    found = [Event("start", start.step, start.time, _started(start)) for start in starts]
    found += [Event("end", end.step, end.time, _ended(end)) for end in ends]
    for path in folder.glob("step*"):
        name = _CHECKPOINT.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # also: removed meanwhile
            if name:
                when = (path / "manifest.json").stat().st_mtime
                found.append(Event("checkpoint", int(name[1]), round(when, 3), "checkpoint"))
    files = bad_step_files(folder)
    for step, kind, path in files[-MOST_EVENTS:]:
        try:
            text = _bad(path, path.stat().st_mtime_ns)
        except (OlmError, OSError) as error:
            notes.append(f"{path.name} cannot be read: {error}")
            text = "its file cannot be read"
        found.append(Event("bad" if kind == "bad" else "spike", step, 0.0, text))
    found.sort(key=lambda event: (event.step, event.time))
    earlier = max(0, len(files) - MOST_EVENTS) + max(0, len(found) - MOST_EVENTS)
    return found[-MOST_EVENTS:], earlier


def _started(start: Start) -> str:
    parts = [f"start on {start.world_size:,} x {start.device or 'unknown device'}"]
    if start.step:
        parts.append(f"from step {start.step:,}")
    if start.rewound:
        parts.append(f"{start.rewound:,} steps lost")
    if start.bad:
        parts.append(f"leaving out {sum(b - a for a, b in start.bad):,} rows")
    parts += start.changes[:MOST_CHANGES]
    if len(start.changes) > MOST_CHANGES:
        parts.append(f"{len(start.changes) - MOST_CHANGES:,} more changes")
    return shown(", ".join(parts))


def _ended(end: End) -> str:
    by = f" by {end.by}" if end.by else ""
    return shown(f"{end.reason}{by} at step {end.step:,}" + (f": {end.why}" if end.why else ""))


@lru_cache(maxsize=2 * MOST_EVENTS)
def _bad(path: Path, changed: int) -> str:
    """Return a bad step in words. Args: changed: when its file was, so that a new one is read."""
    bad = BadStep.read(path)
    places = bad.places()
    more = f" and {len(places) - MOST_NAMED:,} more" if len(places) > MOST_NAMED else ""
    named = f"; {', '.join(places[:MOST_NAMED])}{more}" if places else ""
    return shown(f"loss {bad.loss[:24]}, gradient norm {bad.grad_norm[:24]}{named}")
