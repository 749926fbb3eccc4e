"""What `olm-train evaluate --watch` finds out beside a run: a file for each checkpoint.

    <run>/eval/step00000100.json, step00000100-merged.json     local, or in a remote save folder

Each is written whole, by one process, and replaced when the checkpoint of its name became another
one or more data were asked for. `metrics.jsonl` is the trainer's alone; who shows a run puts these
numbers at their steps.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Literal

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.errors import InputError, OlmError, ValidationError, printable
from olm_data.run_log.log import Evaluation, Time, Values
from olm_data.run_log.metric_names import of_averaged
from olm_data.storage.store import Store

EVAL = "eval"
"""Folder of a run."""
_FILE = re.compile(r"step\d{8,18}(?:-[a-z][a-z0-9_]*)?\.json")


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model was measured on, and how.

    Attributes:
        digest: of the data set or eval set.
        sequence_length: tokens of a row.
        by: what labels were grouped by.
        against: place of the model that a task is compared with; "" without.
    """

    digest: str
    sequence_length: Size
    by: tuple[str, ...] = ()
    against: str = ""


class WatchedEvaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of a checkpoint.

    Attributes:
        checkpoint: name of its folder.
        digest: of its manifest.
        step: optimiser steps done.
        time: when the file was written; another one for each writing.
        data: what was evaluated on, by name.
        results: metrics of each of them; None is what was NaN or infinite.
    """

    checkpoint: str
    digest: str
    step: Size
    time: Time
    data: dict[str, Measured]
    results: dict[str, Values]
    version: Literal[1] = 1

    @property
    def file(self) -> str:
        """Name of its file."""
        return file_name(self.checkpoint)

    @property
    def logged(self) -> Evaluation:
        """As an evaluation of a log: names of averaged weights begin as in the run's own."""
        _, averaged, suffix = self.checkpoint.partition("-")
        results = {
            of_averaged(name, suffix) if averaged else name: values
            for name, values in self.results.items()
        }
        return Evaluation(step=self.step, time=self.time, results=results)

    def write(self, folder: Store) -> None:
        """Write it into the folder `EVAL` of a run, whole and durable.

        Raises:
            ResourceError, StorageError: it cannot be written.
        """
        folder.put(self.file, msgspec.json.encode(self) + b"\n")


def file_name(checkpoint: str) -> str:
    """Return the name of the file of a checkpoint's folder."""
    return f"{checkpoint}.json"


def is_watched_name(name: str) -> bool:
    """Whether a file in `EVAL` is one of these."""
    return _FILE.fullmatch(name) is not None


def read_watched(folder: Store, name: str) -> WatchedEvaluation | None:
    """Return the results in a file of the folder `EVAL`, None where there is none.

    Raises:
        ValidationError: it is malformed.
    """
    try:
        found = decode(folder.read(name), WatchedEvaluation)
        if found.file != name:
            raise MalformedJson(f"it is of {found.checkpoint}")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except InputError as error:
        raise ValidationError(error.what, where=folder.url(name)) from error
    except MalformedJson as error:
        raise ValidationError(
            f"the results are damaged: {printable(str(error))}",
            where=folder.url(name),
            fix="delete the file: `olm-train evaluate --watch` writes it anew",
        ) from None


class WatchedTail:
    """Goes on looking at the files of a run.

    Args:
        run: its folder, local or remote.
        seconds: between two looks.

    Attributes:
        wrong: file and reason of each that cannot be read.
    """

    def __init__(self, run: Store | Path, seconds: float = 0.0) -> None:
        self._folder = (run if isinstance(run, Store) else Store(str(run))).child(EVAL)
        self._seconds, self._looked = seconds, -1e9
        self._have: dict[str, tuple[int, float]] = {}
        self.wrong: dict[str, str] = {}

    def read(self, *, now: bool = False) -> list[WatchedEvaluation]:
        """Return what is new or was written anew, by step.

        Args:
            now: however short ago the last look was.

        Raises:
            StorageError: the store cannot be read.
        """
        if not now and time.monotonic() - self._looked < self._seconds:
            return []
        self._looked = time.monotonic()
        found = list[WatchedEvaluation]()
        for entry in self._folder.entries():
            mark = entry.size, entry.modified
            if not is_watched_name(entry.name) or self._have.get(entry.name) == mark:
                continue
            self._have[entry.name] = mark
            self.wrong.pop(entry.name, None)
            try:
                result = read_watched(self._folder, entry.name)
            except OlmError as error:
                self.wrong[entry.name] = error.what
                continue
            if result is not None:
                found.append(result)
        return sorted(found, key=lambda each: (each.step, each.checkpoint))
