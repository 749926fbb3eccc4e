"""TensorBoard: event files in `tensorboard/` of the run's folder. Nothing leaves the machine.

    steps -> records -> one write -> fsync -> tensorboard/events.out.tfevents.TIME.HOST.PID

A start writes a file of its own, which begins with the step from which on what earlier files have
is void (`purge_step`); readers of the folder leave that out. They take files in the order of the
times in their names, so one is never below that of an earlier file, whatever the clock says. Not
torch's SummaryWriter: its thread takes records that a full disk refuses for written.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from olm_data.extensions.watching.follow import LoggedStep
from olm_data.extras import needs
from olm_train.extensions.tracking.base import Ending, Level, TrackedRun, Tracker
from olm_train.extensions.tracking.callback import TrackerCallback

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

FOLDER = "tensorboard"
_NAME = re.compile(r"events\.out\.tfevents\.([0-9]{10,18})\.")


@dataclass(kw_only=True)
class TensorBoardCallback(TrackerCallback):
    """Shows the run in TensorBoard: `tensorboard --logdir RUN/tensorboard`.

    Attributes:
        enabled: write event files, where `tensorboard` is given at all.
        name: shown above the configuration; default: that of the run's folder.
        project: shown with it; default: "olm".
    """

    kind: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboard"

    def tracker(self, run: TrackedRun) -> Tracker:
        return TensorBoardTracker(run)


class TensorBoardTracker(Tracker):
    """Writes event files; what `log` returns for is on the disk."""

    name = "tensorboard"
    any_order = True

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._logged, self._last = 0, 0
        self._file: EventFile | None = None

    def open(self, key: str | None, logged: int) -> str:
        self._close()
        self._logged = logged if key else 0
        return FOLDER

    def truncate(self, step: int) -> int:
        with needs("the tracker tensorboard"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # A step that was being written when the process was killed is beyond `logged`.
        there = min(step, self._logged)
        now = time.time()
        first = [
            Event(wall_time=now, file_version="brain.Event:2"),
            Event(wall_time=now, step=there + 1, session_log=SessionLog(status=SessionLog.START)),
        ]
        if not there:
            config = json.dumps(self._run.config, indent=1, default=str)
            title = f"{self._run.project}: {self._run.name}"
            first.append(_text("config", f"# {title}\n```json\n{config}\n```", 0))
        self._file = EventFile(self._run.folder / FOLDER, first)
        return there

    def log(self, steps: list[LoggedStep]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        assert self._file is not None
        self._file.write(
            [
                Event(
                    wall_time=step.time or time.time(),
                    step=step.step,
                    summary=Summary(
                        value=[
                            Summary.Value(tag=name, simple_value=value)
                            for name, value in step.metrics.items()
                        ]
                    ),
                )
                for step in steps
            ]
        )
        self._last = max(self._last, steps[-1].step)

    def alert(self, title: str, text: str, level: Level) -> None:
        assert self._file is not None
        self._file.write([_text(f"alert/{level}", f"**{title}**\n\n{text}", self._last)])

    def close(self, ending: Ending) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


class EventFile:
    """A new event file, read after all that are in its folder.

    Args:
        folder: made where it is not there.
        first: events that it begins with.

    Raises:
        OSError: the disk refuses them; then there is no file.
    """

    def __init__(self, folder: Path, first: Sequence[Event]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = [int(found[1]) for name in os.listdir(folder) if (found := _NAME.match(name))]
        stamp = max([int(time.time()), *(number + 1 for number in earlier)])
        path = folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  # closed in `close`
        self._end = 0
        try:
            self.write(first)
        except OSError:
            self.close()
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def write(self, events: Sequence[Event]) -> None:
        """Append all of some events, or none; returns when they are on the disk.

        Raises:
            OSError: the disk refuses them.
        """
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        rest = records.getbuffer()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._end = self._file.tell()

    def close(self) -> None:
        self._file.close()


def _text(tag: str, text: str, step: int) -> Event:
    """Return an event with a text in Markdown."""
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard import summary

    return Event(wall_time=time.time(), step=step, summary=summary.text(tag, text))
