"""The curves of a run as a page draws them: every step is kept, a bounded number of points is sent.

    extend(steps)...        points(have) -> the points that are new

A point stands for `size` neighbouring steps, a power of two that grows with the run: a million
steps are about 2,000 points, with lowest and highest values so that no spike is lost. Points that
were sent do not change until `size` does, but for the last one.

Also: loss by source and by place in the document, kept up with the ledger of a run as it grows.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from olm_data.errors import ValidationError, printable
from olm_data.extensions.ledger.files import LEDGER, LedgerFile, ledger_files
from olm_data.extensions.show.ledger import POSITION_EDGES, POSITION_NAMES, source_numbers
from olm_data.extensions.watching.follow import StepColumns

POINTS = 256
MOST_SOURCES = 8
"""Curves of sources; the rest are added up in one more."""
_COLUMNS = ("step", "source", "start", "tokens", "nats")

_Sums = np.ndarray[Any, Any]
"""float64 [keys, 2, POINTS]: nats and labels."""


class LedgerCurve(msgspec.Struct, frozen=True):
    """Nats a label at each point; None where there was no label."""

    name: str
    losses: list[float | None]


class LedgerCurves(msgspec.Struct, frozen=True, kw_only=True):
    """What a page draws of a ledger.

    Attributes:
        until: the last step of each point.
        sources: those with most labels, first the largest.
        positions: by where in its document a piece begins.
    """

    until: list[int]
    sources: list[LedgerCurve]
    positions: list[LedgerCurve]


class LedgerTail:
    """Where a reader of a ledger is.

    Attributes:
        changes: how often what it knows has changed.
        wrong: what is said of files that are not what a run writes, which are left out; "" without.
        more: whether there are files left to read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.changes, self.more = 0, False
        self._begin()

    def _begin(self) -> None:
        self._known: dict[Path, tuple[int, int, int]] = {}
        self._names: list[str] = []
        self._sources: _Sums = np.zeros((0, 2, POINTS))
        self._positions: _Sums = np.zeros((len(POSITION_NAMES), 2, POINTS))
        self._width, self._last = 1, 0
        self.wrong = ""

    def read(self, seconds: float) -> None:
        """Read the files that are new; after so many seconds the rest is left for the next call."""
        deadline = time.monotonic() + seconds
        there = {file.path: (file, _mark(file.path)) for file in ledger_files(self._folder)}
        if any(path not in there or there[path][1] != mark for path, mark in self._known.items()):
            self._begin()
            self.changes += 1
        self.more = False
        for path, (file, mark) in there.items():
            if path in self._known or mark is None:
                continue
            if time.monotonic() > deadline:
                self.more = True
                return
            self._known[path] = mark
            self.changes += 1
            try:
                self._add(file)
            except ValidationError as error:
                self.wrong = self.wrong or printable(
                    f"{LEDGER}/{path.name} cannot be read and is left out: {error.why}"
                )

    def _add(self, file: LedgerFile) -> None:
        _, table = file.read(_COLUMNS)
        if not table.num_rows:
            return
        step, start, labels, nats = (
            table[name].to_numpy() for name in _COLUMNS if name != "source"
        )
        number = source_numbers(table["source"], self._names)
        finite = np.isfinite(nats)
        self._last = max(self._last, int(step.max()))
        while (self._last - 1) // self._width >= POINTS:
            self._width *= 2
            self._sources, self._positions = map(_halved, (self._sources, self._positions))
        new = len(self._names) - len(self._sources)
        self._sources = np.concatenate([self._sources, np.zeros((new, 2, POINTS))])
        point = ((step - 1) // self._width)[finite]
        places = np.searchsorted(POSITION_EDGES, start, side="right")
        for sums, key in ((self._sources, number), (self._positions, places)):
            np.add.at(sums, (key[finite], 0, point), nats[finite])
            np.add.at(sums, (key[finite], 1, point), labels[finite])

    def curves(self) -> LedgerCurves | None:
        """Return the curves as far as they are read; None: there is no ledger."""
        if not self._last:
            return None
        there = np.flatnonzero(self._positions[:, 1].sum(0))
        order = sorted(range(len(self._names)), key=lambda i: -self._sources[i, 1].sum())
        sources = [(self._names[i], self._sources[i]) for i in order[:MOST_SOURCES]]
        if rest := order[MOST_SOURCES:]:
            sources.append((f"{len(rest):,} other sources", self._sources[rest].sum(0)))
        positions = zip(POSITION_NAMES, self._positions, strict=True)
        ends = np.minimum((there + 1) * self._width, self._last)
        return LedgerCurves(
            until=ends.tolist(),
            sources=[_curve(name, sums, there) for name, sums in sources],
            positions=[_curve(name, sums, there) for name, sums in positions if sums[1].any()],
        )


def _curve(name: str, sums: np.ndarray[Any, Any], there: np.ndarray[Any, Any]) -> LedgerCurve:
    nats, labels = sums[:, there].tolist()
    losses = [float(f"{a / b:.6g}") if b else None for a, b in zip(nats, labels, strict=True)]
    return LedgerCurve(printable(name), losses)


def _halved(sums: _Sums) -> _Sums:
    """Return the sums over twice as many steps a point."""
    pairs = sums.reshape(len(sums), 2, POINTS // 2, 2).sum(-1)
    return np.concatenate([pairs, np.zeros_like(pairs)], -1)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced; None: it is gone."""
    try:
        stat = path.lstat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


MOST_POINTS = 2000


class Points(msgspec.Struct, frozen=True, kw_only=True):
    """Points of curves, all over the same steps.

    Attributes:
        first: number of the first one sent, from 0.
        size: steps that each stands for.
        steps: the first step of each.
        tokens: trained on after the first step of each.
        time: seconds from the run's first step to the first step of each.
        values: mean of each by metric; None where nothing was logged.
        low, high: of the metrics, where a point stands for several steps; else empty.
    """

    first: int
    size: int
    steps: list[int]
    tokens: list[int]
    time: list[float]
    values: dict[str, list[float | None]]
    low: dict[str, list[float | None]]
    high: dict[str, list[float | None]]


class Curves:
    """The values of some metrics at all steps of a run.

    Args:
        names: of the metrics.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._steps, self._places, self._tokens = array("q"), array("q"), array("q")
        self._times = array("d")
        self._values = {name: array("d") for name in names}

    def __len__(self) -> int:
        return len(self._steps)

    def extend(self, steps: StepColumns) -> None:
        """Add steps, and where their lines stand in the log."""
        self._steps.frombytes(steps.step.astype(np.int64).tobytes())
        self._places.frombytes(steps.place.astype(np.int64).tobytes())
        self._tokens.frombytes(steps.tokens.astype(np.int64).tobytes())
        self._times.frombytes(steps.time.astype(np.float64).tobytes())
        for name, column in self._values.items():
            column.frombytes(steps.metrics[name].astype(np.float64).tobytes())

    def place(self, step: int) -> int | None:
        """Return where the line of the step stands, or of the last one before it; None: none."""
        if not self._steps:
            return None
        index = int(np.searchsorted(np.array(self._steps), step, side="right")) - 1
        return self._places[max(0, index)]

    def between(self, first: int, last: int) -> range:
        """Return the indices of the steps from `first` to `last`, both of them included."""
        steps = np.array(self._steps)
        return range(
            int(np.searchsorted(steps, first)), int(np.searchsorted(steps, last, side="right"))
        )

    def last(self, name: str, count: int = 1) -> float | None:
        """Return the mean of the last `count` steps at which a metric was logged; None: never."""
        tail = np.array(self._values[name][-max(64, 4 * count) :])
        tail = tail[np.isfinite(tail)][-count:]
        return float(tail.mean()) if len(tail) else None

    def points(self, indices: range, size: int = 0, have: int = 0) -> Points:
        """Return points of some steps.

        Args:
            indices: of the steps.
            size, have: size and number of the points that are known; the last one is sent again.
        """
        wanted = 1
        while -(-len(indices) // wanted) > MOST_POINTS:
            wanted *= 2
        first = max(0, have - 1) if size == wanted and have * size < len(indices) + size else 0
        part = slice(indices.start + first * wanted, indices.stop)
        values, low, high = {}, {}, {}
        for name, column in self._values.items():
            rows = _in_rows(np.array(column[part]), wanted)
            there = np.isfinite(rows)
            with np.errstate(invalid="ignore"):
                values[name] = _plain(np.where(there, rows, 0).sum(1) / there.sum(1))
            if wanted > 1:
                low[name] = _plain(np.where(there, rows, np.inf).min(1))
                high[name] = _plain(np.where(there, rows, -np.inf).max(1))
        steps, tokens, times = (
            np.array(column[part])[::wanted] for column in (self._steps, self._tokens, self._times)
        )
        began = self._times[0] if self._times else 0.0
        return Points(
            first=first,
            size=wanted,
            steps=steps.tolist(),
            tokens=tokens.tolist(),
            time=np.round(times - began, 3).tolist(),
            values=values,
            low=low,
            high=high,
        )


def _in_rows(values: np.ndarray, size: int) -> np.ndarray:
    """float64 [n] -> [ceil(n / size), size], NaN at the end."""
    padding = np.full(-len(values) % size, np.nan)
    return np.concatenate([values.astype(np.float64), padding]).reshape(-1, size)


def _plain(values: np.ndarray) -> list[float | None]:
    """Return numbers of six digits: more is seen on no screen."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
