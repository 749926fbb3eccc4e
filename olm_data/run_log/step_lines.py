"""Many lines of `metrics.jsonl` at once: steps as columns.

    bytes of whole lines --decode_steps, many together--> StepColumns, ...
                         `-- halves, where not all are plain steps; one by one --decode_line-->

Nothing is taken together that `decode_line` refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from olm_data.errors import ValidationError
from olm_data.order.steps import Range
from olm_data.run_log.log import Evaluation, Step, decode_line, decode_steps

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
