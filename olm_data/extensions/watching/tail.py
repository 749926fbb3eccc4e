"""Goes on reading `metrics.jsonl` while a run writes it: only what is new is read.

    LogTail.read() -> StepColumns | Evaluation, ...     again and again

A resumed run replaces the file by one without the steps it lost; then all is read anew. A line that
is not what a run writes is left out, counted and said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from olm_data.extensions.watching.step_lines import StepColumns, StepLines
from olm_data.regular_files import open_regular
from olm_data.run_log.lines import MAX_LINE, malformed_log
from olm_data.run_log.log import COUNTED, METRICS, Evaluation, Step, decode_line

PIECE = 1 << 20
"""Bytes that are read at once."""
MARK = 64
"""Last bytes that were read, by which a file is known: a new one may have an old one's number."""


class LogTail:
    """Where a reader of a log is.

    Args:
        folder: of the run.
        metrics: names of those to keep of each step.

    Attributes:
        generation: how often the file was replaced; what was read before holds no longer.
        read_share: of the file's bytes, 0 to 1.
    """

    def __init__(self, folder: Path, metrics: Collection[str]) -> None:
        self.path, self._metrics = folder / METRICS, metrics
        self.generation, self.read_share = 0, 0.0
        self._begin()
        self._file: tuple[int, int] | None = None

    def _begin(self) -> None:
        self._place, self._mark = 0, b""
        self._lines = StepLines(self.path, self._metrics)

    @property
    def wrong(self) -> str:
        """What is said of lines that are not what a run writes; "" without."""
        count, first = self._lines.wrong, self._lines.first_wrong
        lines = "1 line" if count == 1 else f"{count:,} lines"
        return f"{lines} of {METRICS} left out as malformed, the first: {first}" if count else ""

    def read(self, seconds: float) -> list[StepColumns | Evaluation]:
        """Return what the lines since the last call say, those left out that are malformed.

        Args:
            seconds: after which it returns, with more to read.

        Raises:
            ValidationError: it is no regular file, or a line is longer than any that is written.
        """
        found: list[StepColumns | Evaluation] = []
        deadline = time.monotonic() + seconds
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            self.read_share = 1.0
            return found
        with file:
            stat = os.fstat(file.fileno())
            if self._file != (stat.st_dev, stat.st_ino) or not self._goes_on(file):
                self._file = stat.st_dev, stat.st_ino
                self._begin()
                self.generation += 1
            self.read_share = 1.0
            for data in self._pieces(file):
                found += self._lines.read(data, self._place)
                self._place += len(data)
                self._mark = (self._mark + data[-MARK:])[-MARK:]
                if time.monotonic() > deadline:
                    self.read_share = min(1.0, self._place / max(1, stat.st_size))
                    break
        return found

    def _goes_on(self, file: IO[bytes]) -> bool:
        """Whether a file has what was read last where it was."""
        file.seek(self._place - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield whole lines from where the reader is, about `PIECE` bytes of them at a time."""
        while True:
            file.seek(self._place)
            data = file.read(PIECE)
            while (end := data.rfind(b"\n") + 1) == 0 and (more := file.read(PIECE)):
                data += more
                if len(data) > MAX_LINE:
                    raise malformed_log(self.path, f"a line is longer than {MAX_LINE:,} bytes")
            if not end:
                return
            yield data[:end]

    def step_at(self, place: int) -> Step | None:
        """Return the step whose line begins at a place of the file; None: it is gone from there.

        Raises:
            ValidationError: there is no line of a step.
        """
        with open_regular(self.path) as file:
            stat = os.fstat(file.fileno())
            if self._file != (stat.st_dev, stat.st_ino):
                return None
            file.seek(place)
            entry = decode_line(self.path, 0, file.readline(MAX_LINE), (*COUNTED, *self._metrics))
        return entry if isinstance(entry, Step) else None
