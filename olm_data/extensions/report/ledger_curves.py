"""Loss by source and by place in the document, kept up with the ledger of a run as it grows.

    files of the ledger, each read once --sums by (source, steps), (place, steps)--> LedgerCurves

A point stands for as many neighbouring steps as all others, a power of two that grows with the run.
A resumed run cuts or removes files; then all are read anew.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from olm_data.errors import ValidationError, printable
from olm_data.extensions.ledger.files import LEDGER, LedgerFile, ledger_files
from olm_data.extensions.show.ledger_summary import POSITION_EDGES, POSITION_NAMES, source_numbers

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
