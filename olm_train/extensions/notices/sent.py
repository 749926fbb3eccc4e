"""What a run has told already, so that a restart does not tell it again.

    <run>/notified.json        written by the run, `callbacks.notifier`
    <run>/watched.json         written by `olm-train notify`

Read and written here only, each by one process at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from olm_data.bounded_json import MalformedJson, decode
from olm_data.errors import OlmError, printable
from olm_data.regular_files import read_regular
from olm_data.storage.disk import write_durable
from olm_train.callbacks.notice import Event, Notice

WATCHED = "watched.json"
MOST_KEPT = 1000
"""Messages that are remembered, the newest."""
HOUR = 3600.0


class Told(msgspec.Struct, frozen=True):
    """A message that was sent: its event and step, and when (seconds since 1970)."""

    event: Event
    step: Annotated[int, Meta(ge=0)]
    time: float


class Notified(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file, oldest message first."""

    told: tuple[Told, ...] = ()
    version: Literal[1] = 1


class SentLog:
    """The messages of a run; those of earlier starts are read at once.

    Args:
        path: `NOTIFIED` or `WATCHED` in the folder of the run.

    Attributes:
        note: why the file could not be read, None where it could; then it begins anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.note: str | None = None
        self._content = Notified()
        try:
            if path.exists():
                self._content = decode(read_regular(path), Notified)
        except (MalformedJson, OlmError, OSError) as error:
            said = error.what if isinstance(error, OlmError) else printable(str(error))
            self.note = f"{path} cannot be read, messages may be sent again: {said[:200]}"

    def has(self, notice: Notice) -> bool:
        """Whether this was told: the same event at the same step."""
        return any((t.event, t.step) == (notice.event, notice.step) for t in self._content.told)

    def in_last_hour(self, now: float) -> int:
        """Return how many messages were sent in the hour before `now`."""
        return sum(1 for told in self._content.told if now - HOUR < told.time <= now)

    def add(self, notice: Notice, now: float) -> None:
        """Note that a message was sent.

        Raises:
            OSError: the file cannot be written; it is remembered in memory.
        """
        told = Told(notice.event, notice.step, now)
        self._content = Notified(told=(*self._content.told, told)[-MOST_KEPT:])
        temporary = self._path.with_name(self._path.name + ".tmp")
        write_durable(temporary, msgspec.json.encode(self._content))
        os.replace(temporary, self._path)
