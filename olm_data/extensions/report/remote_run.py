"""The folder of a run in a remote store, kept up on this machine as it changes there.

    s3://bucket/run --listed every 30 s, what has changed is read--> local folder --> RunView

A run with a remote save folder writes its log there at each checkpoint, so this is how the run was
then. Of a log that has grown only the end is read.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from olm_data.errors import InputError, OlmError, shown
from olm_data.extensions.ledger.files import LEDGER, is_ledger_name
from olm_data.extensions.watching.watched import EVAL, is_watched_name
from olm_data.run_log.log import ENDS, METRICS, STARTS
from olm_data.run_log.run_folder import CONFIG, ENVIRONMENT, SAMPLE, SAMPLES
from olm_data.storage.store import Entry, Store

SECONDS = 30.0
"""Between two looks at the store."""
OVERLAP = 1 << 12
"""Bytes before the end of what is here that are read again, to see that the log has only grown."""

_FILES = frozenset({METRICS, STARTS, ENDS, CONFIG, ENVIRONMENT, SAMPLE, SAMPLES})
_MANIFEST = re.compile(r"step[0-9]{1,18}/manifest\.json")


class RemoteRun:
    """Keeps a local folder up with a remote run, in a thread of its own; closed by `with`.

    Args:
        url: of the save folder.
        folder: empty, on this machine.
        seconds: between two looks.

    Raises:
        InputError: there is no run.
        StorageError: the store cannot be read.
    """

    def __init__(self, url: str, folder: Path, seconds: float = SECONDS) -> None:
        self.url, self.folder = url, folder
        self._store, self._seconds = Store(url), seconds
        self._have: dict[str, tuple[int, float]] = {}
        self._said = ""
        self._end = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self.look()
        if not {METRICS, CONFIG} & self._have.keys():
            raise InputError(
                f"this is not a run folder: it has no {METRICS} and no {CONFIG}",
                where=shown(url),
                fix="give the trainer.save_folder of a run; its log is there after the first "
                "checkpoint",
            )
        self._thread = threading.Thread(target=self._go_on, name="watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> RemoteRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def note(self) -> str:
        """Return what a page says of it."""
        when = f"{self.url} is looked at every {self._seconds:g} s; its log is as of a checkpoint"
        return shown(f"{when}; {self._said}" if self._said else when)

    def look(self) -> None:
        """Bring what has changed.

        Raises:
            StorageError: the store cannot be read.
        """
        there = {entry.name: entry for entry in self._store.entries() if _wanted(entry.name)}
        for name in self._have.keys() - there.keys():
            (self.folder / name).unlink(missing_ok=True)
            del self._have[name]
        for name, entry in sorted(there.items(), key=lambda item: item[0] != CONFIG):
            mark = entry.size, entry.modified
            if self._have.get(name) != mark:
                self._bring(entry)
                self._have[name] = mark

    def _bring(self, entry: Entry) -> None:
        path = self.folder / entry.name
        path.parent.mkdir(exist_ok=True)
        if entry.name == METRICS and self._grow(path, entry):
            return
        arriving = path.with_name(path.name + ".tmp")
        self._store.download(entry.name, arriving)
        os.replace(arriving, path)

    def _grow(self, path: Path, entry: Entry) -> bool:
        """Append what is new if what is here is the beginning of what is there."""
        size = path.stat().st_size if path.exists() else 0
        if not 0 < size < entry.size:
            return False
        begin = max(0, size - OVERLAP)
        data = self._store.read(entry.name, begin, entry.size)
        with path.open("r+b") as file:
            file.seek(begin)
            if file.read() != data[: size - begin]:
                return False
            file.write(data[size - begin :])
        return True

    def _go_on(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                self.look()
                self._said = ""
            except (OlmError, OSError) as error:
                what = error.what if isinstance(error, OlmError) else str(error)
                self._said = f"the last look failed: {what}"


def _wanted(name: str) -> bool:
    folder, _, last = name.rpartition("/")
    if folder == LEDGER:
        return is_ledger_name(last)
    if folder == EVAL:
        return is_watched_name(last)
    return name in _FILES or _MANIFEST.fullmatch(name) is not None
