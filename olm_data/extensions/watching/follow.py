"""The log of a run, read while it grows: from the middle of the file, a step at a time.

    metrics.jsonl --offset_of_step--> place --> StepReader.read, again and again --> LoggedStep

A step is given out when all its lines are there, which is when one of a later step follows, or the
log is known to be complete.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from olm_data.regular_files import open_regular
from olm_data.run_log.lines import MAX_LINE, lines
from olm_data.run_log.log import METRICS, Evaluation, Step, Values, decode_line
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
    path = folder / METRICS
    if not path.exists():
        return 0
    return max(0, _bisect(path, 1 << 62)[1])


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
    path = folder / METRICS
    return _bisect(path, step)[0] if path.exists() else 0


def _bisect(path: Path, step: int) -> tuple[int, int]:
    """Return where the first line of `step` or a later one begins, and the step before it."""
    before = 0
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
