"""The log of a run, read while it grows: from the middle of the file, a step at a time.

    metrics.jsonl --offset_of_step--> place --> StepReader.read, again and again --> LoggedStep

A step is given out when all its lines are there, which is when one of a later step follows, or the
log is known to be complete.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from olm_data.errors import ValidationError
from olm_data.order.steps import Range
from olm_data.regular_files import open_regular
from olm_data.run_log.lines import MAX_LINE, lines, malformed_log
from olm_data.run_log.log import (
    COUNTED,
    METRICS,
    Evaluation,
    Step,
    Values,
    decode_line,
    decode_steps,
)
from olm_data.run_log.metric_names import of_evaluation


class LoggedStep(msgspec.Struct, kw_only=True):
    """What the log says of a step, that of evaluations after it included.

    Attributes:
        step: its number.
        time: when its last line was made, seconds since 1970.
        lines: that the log has of it, those counted that were not asked for.
        metrics: by name; those of an evaluation as `eval/DATASET/METRIC`. NaN where the log has
            null, for what was NaN or infinite.
    """

    step: int
    time: float = 0.0
    lines: int = 0
    metrics: dict[str, float] = {}


class StepReader:
    """Reads steps from where it stopped.

    Args:
        folder: of the run.
        step, lines: where to begin: after so many lines of this step, logged already or not.

    Raises:
        ValidationError: a line is not what a run writes.
    """

    def __init__(self, folder: Path, step: int = 0, lines: int = 0) -> None:
        self._folder = folder
        self._first, self._skip = step, lines
        self._offset = offset_of_step(folder, step)
        self._open: LoggedStep | None = None

    def read(self, *, complete: bool = False) -> Iterator[LoggedStep]:
        """Yield the steps whose lines are all there.

        Args:
            complete: no line follows, so the last step is given too.

        Raises:
            ValidationError: a line is not what a run writes.
        """
        for line, end in follow_metrics(self._folder, self._offset):
            self._offset = end
            if line.step < self._first:
                continue
            here = self._open
            if here is not None and here.step != line.step:
                yield from self._given()
            if self._open is None:
                self._open = LoggedStep(step=line.step, metrics={})
            here = self._open
            here.lines += 1
            if line.step == self._first and here.lines <= self._skip:
                continue
            here.time = line.time
            here.metrics.update(_metrics_of(line))
        if complete:
            yield from self._given()

    def _given(self) -> Iterator[LoggedStep]:
        here, self._open = self._open, None
        if here is not None and (here.step != self._first or here.lines > self._skip):
            yield here


def lines_of_step(folder: Path, step: int) -> int:
    """Return how many lines the log has of a step."""
    count = 0
    for line, _ in follow_metrics(folder, offset_of_step(folder, step)):
        if line.step != step:
            break
        count += 1
    return count


def last_step(folder: Path) -> int:
    """Return the last step that the log has a line of, 0 for none."""
    return max(0, _bisect(folder / METRICS, 1 << 62)[1])


def follow_metrics(folder: Path, offset: int) -> Iterator[tuple[Step | Evaluation, int]]:
    """Yield the whole lines from byte `offset` on with all their metrics, and where each ends.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    path = folder / METRICS
    for number, line in lines(path, offset=offset):
        offset += len(line)
        yield decode_line(path, number, line, None), offset


def offset_of_step(folder: Path, step: int) -> int:
    """Return where in `metrics.jsonl` the lines of a step begin, or those of the next one there.

    By bisection: a log is long. 0 where there is no such file.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    return _bisect(folder / METRICS, step)[0]


def _bisect(path: Path, step: int) -> tuple[int, int]:
    """Return where the first line of `step` or a later one begins, and the step before it."""
    before = 0
    if not path.exists():
        return 0, 0
    with open_regular(path) as file:
        low, high = 0, file.seek(0, os.SEEK_END)
        while low < high:  # lines that begin before `low` are of earlier steps, from `high` on not
            middle = (low + high) // 2
            file.seek(max(0, middle - 1))
            begin = file.tell() + len(file.readline(MAX_LINE)) if middle else 0
            line = file.readline(MAX_LINE)
            found = decode_line(path, 0, line, ()).step if line.endswith(b"\n") else step
            if found < step:
                low, before = begin + len(line), found
            else:
                high = middle
    return low, before


def _metrics_of(line: Step | Evaluation) -> dict[str, float]:
    if isinstance(line, Step):
        return _numbers(line.metrics)
    return {
        of_evaluation(name, metric): value
        for name, results in line.results.items()
        for metric, value in _numbers(results).items()
    }


def _numbers(values: Values) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


TOGETHER = 256
"""Lines that are decoded at once; where that fails, halves of them, and so on."""


@dataclass(frozen=True)
class StepColumns:
    """Steps that follow each other in a log; all arrays are [n].

    Attributes:
        place: int64, where the line of each begins in the file, in bytes.
        step, tokens: int64.
        time: float64, seconds since 1970.
        rows: int64 [n, 2].
        skipped: ranges that steps left out, in order.
        metrics: float64 by name; NaN where a line has null, or lacks it.
    """

    place: np.ndarray[Any, Any]
    step: np.ndarray[Any, Any]
    tokens: np.ndarray[Any, Any]
    time: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]
    metrics: dict[str, np.ndarray[Any, Any]]
    skipped: list[Range] = field(default_factory=list)


class StepLines:
    """Reads the lines of one log in order; a malformed one is counted and left out.

    Args:
        path: of the log, to name in errors.
        metrics: names of the metrics to keep.

    Attributes:
        lines, wrong: lines read so far, and how many of them were malformed.
        first_wrong: what is wrong with the first of these.
    """

    def __init__(self, path: Path, metrics: Collection[str]) -> None:
        self._path, self._metrics = path, list(metrics)
        self.lines = self.wrong = 0
        self.first_wrong = ""

    def read(self, data: bytes, place: int) -> Iterator[StepColumns | Evaluation]:
        """Yield what whole lines say; the first of them begins at `place` of the file."""
        lines = [line + b"\n" for line in data.split(b"\n")[:-1]]
        for _, alike in groupby(lines, lambda line: b'"eval"' in line):
            waiting = iter(alike)
            while some := list(islice(waiting, TOGETHER)):
                yield from self._take(some, place)
                place += sum(map(len, some))

    def _take(self, lines: Sequence[bytes], place: int) -> Iterator[StepColumns | Evaluation]:
        steps = decode_steps(lines, self._metrics)
        if steps is not None:
            self.lines += len(lines)
            yield self._columns(steps, place + np.cumsum([0, *map(len, lines[:-1])]))
        elif len(lines) > 1:
            half = len(lines) // 2
            yield from self._take(lines[:half], place)
            yield from self._take(lines[half:], place + sum(map(len, lines[:half])))
        else:
            self.lines += 1
            try:
                entry = decode_line(self._path, self.lines, lines[0], self._metrics)
            except ValidationError as error:
                self.wrong += 1
                self.first_wrong = self.first_wrong or error.why or ""
            else:
                if isinstance(entry, Step):
                    yield self._columns([entry], np.array([place]))
                else:
                    yield entry

    def _columns(self, steps: Sequence[Step], place: np.ndarray[Any, Any]) -> StepColumns:
        found = [step.metrics for step in steps]
        return StepColumns(
            place=place,
            step=np.array([step.step for step in steps], np.int64),
            tokens=np.array([step.tokens for step in steps], np.int64),
            time=np.array([step.time for step in steps], np.float64),
            rows=np.array([step.rows for step in steps], np.int64),
            metrics={n: np.array([m.get(n) for m in found], np.float64) for n in self._metrics},
            skipped=[each for step in steps for each in step.skipped],
        )


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
