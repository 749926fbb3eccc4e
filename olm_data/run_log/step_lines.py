"""Many lines of `metrics.jsonl` at once: steps as columns, by one typed decode of all of them.

    bytes of whole lines --decode, as often as their names change--> StepColumns, ...
                         `-- a line of other names --decode_line--> learned, or counted as wrong

Most lines of a log have the same names. Such names are made a type once, and neighbouring lines of
it are decoded together. Nothing is taken this way that `decode_line` refuses: a line of the type
has each name once when it has as many colons as the type, and no escapes; its integers are narrow
when the lines hold no long run of digits. Lines of which that cannot be said go through
`decode_line` one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from olm_data.bounded_json import MAX_DIGITS, Size
from olm_data.counts import MAX_COUNT
from olm_data.decoding import decoder
from olm_data.errors import ValidationError
from olm_data.order.steps import Range
from olm_data.run_log.log import Evaluation, Time, decode_line

TOGETHER = 256
"""Lines that are decoded at once; where that fails, parts of them, and so on."""
MOST_SHAPES, MOST_LEARNED = 8, 64
"""Types that are kept, and that are made in all."""

_TYPES: dict[str, Any] = {
    "step": Size,
    "time": Time,
    "tokens": Size,
    "rows": tuple[Size, Size],
    "epoch": Size,
    "order": str,
    "version": Literal[1, 2],
}
_APART = frozenset({"skipped", "eval"})
"""Names of lines that are read one by one."""
_INTEGER = re.compile(rb"(?<![.0-9])[0-9]{%d}" % (MAX_DIGITS + 1))
_NOT_IN_NAMES = frozenset('"\\')


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


_Found = StepColumns | tuple[int, Evaluation]
"""Of an evaluation with the place of its line."""


@dataclass(frozen=True)
class _Part:
    """Some lines of a log.

    Attributes:
        data: their bytes, one after the other.
        edges: int64 [n + 1], where each begins in `data` and the last one ends.
        places, numbers: int64 [n], where in the file each begins, and which line it is, from 1.
    """

    data: bytes
    edges: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]
    numbers: np.ndarray[Any, Any]

    def of(self, lines: np.ndarray[Any, Any]) -> _Part:
        """Return some of the lines, given by their indices, ascending."""
        pairs = zip(self.edges[lines].tolist(), self.edges[lines + 1].tolist(), strict=True)
        texts = [self.data[begin:end] for begin, end in pairs]
        edges = np.cumsum([0, *map(len, texts)])
        return _Part(b"".join(texts), edges, self.places[lines], self.numbers[lines])


class StepLines:
    """Decodes the lines of one log.

    Args:
        path: for messages.
        metrics: names of those to keep of each step.

    Attributes:
        lines: how many were read.
        wrong: those of them that are not what a run writes, which are left out.
        first_wrong: what is said of the first of them, "" without.
    """

    def __init__(self, path: Path, metrics: Collection[str]) -> None:
        self._path, self._metrics = path, list(metrics)
        self._shapes: list[_Shape] = []
        self._seen: set[frozenset[str]] = set()
        self._learned = 0
        self.lines = self.wrong = 0
        self.first_wrong, self._first = "", MAX_COUNT

    def read(self, data: bytes, place: int) -> Iterator[StepColumns | Evaluation]:
        """Yield what whole lines say, in their order.

        Args:
            data: the lines, each with its line break.
            place: where they begin in the file.
        """
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
        edges = np.concatenate([[0], ends])
        for first in range(0, len(ends), TOGETHER):
            some = edges[first : first + TOGETHER + 1]
            count = len(some) - 1
            part = _Part(
                data[some[0] : some[-1]],
                some - some[0],
                place + some[:-1],
                self.lines + 1 + np.arange(count),
            )
            found: list[_Found] = []
            self._take(part, found)
            self.lines += count
            yield from _in_order(found)

    def _take(self, part: _Part, found: list[_Found]) -> None:
        """Add what lines say to `found`, in any order."""
        count = len(part.places)
        colons = np.frombuffer(part.data, np.uint8) == ord(":")
        whole, rest = divmod(int(np.count_nonzero(colons)), count)
        for number, shape in enumerate(self._shapes):
            if shape.colons == whole and not rest and (columns := shape.columns(part)) is not None:
                self._shapes.insert(0, self._shapes.pop(number))
                found.append(columns)
                return
        if count == 1:
            self._take_one(part, found)
            return
        counts = np.add.reduceat(colons, part.edges[:-1], dtype=np.int32)
        if (counts == counts[0]).all():
            parts = np.array_split(np.arange(count), min(count, 8))
        else:
            parts = [np.flatnonzero(counts == each) for each in np.unique(counts)]
        for lines in parts:
            self._take(part.of(lines), found)

    def _take_one(self, part: _Part, found: list[_Found]) -> None:
        place, number = int(part.places[0]), int(part.numbers[0])
        try:
            entry = decode_line(self._path, number, part.data, self._metrics)
        except ValidationError as error:
            self.wrong += 1
            if self._first > number:
                self._first, self.first_wrong = number, error.why or ""
            return
        if isinstance(entry, Evaluation):
            found.append((place, entry))
            return
        self._learn(part.data)
        columns = StepColumns(
            place=np.array([place]),
            step=np.array([entry.step]),
            tokens=np.array([entry.tokens]),
            time=np.array([entry.time]),
            rows=np.array([entry.rows]),
            metrics={n: np.array([entry.metrics.get(n)], np.float64) for n in self._metrics},
            skipped=list(entry.skipped),
        )
        found.append(columns)

    def _learn(self, line: bytes) -> None:
        """Make the names of a good line a type when they come a second time."""
        names = list(msgspec.json.decode(line))
        have = frozenset(names)
        plain = all(name.isprintable() and not _NOT_IN_NAMES & set(name) for name in names)
        if not plain or have & _APART or self._learned == MOST_LEARNED:
            return
        if have not in self._seen:
            self._seen = {have} if len(self._seen) == MOST_LEARNED else self._seen | {have}
            return
        self._learned += 1
        self._shapes.insert(0, _Shape(names, self._metrics))
        del self._shapes[MOST_SHAPES:]


class _Shape:
    """Lines that have certain names and no others, each once."""

    def __init__(self, names: Sequence[str], metrics: Sequence[str]) -> None:
        places = {name: f"f{number}" for number, name in enumerate(names)}
        numbers: Any = float | None
        kind = msgspec.defstruct(
            "Line",
            [(place, _TYPES.get(name, numbers)) for name, place in places.items()],
            rename={place: name for name, place in places.items()},
            forbid_unknown_fields=True,
            gc=False,
        )
        self._decoder: msgspec.json.Decoder[Any] = decoder(kind)
        self.colons = len(names) + sum(name.count(":") for name in names)
        self._get: dict[str, Callable[[Any], Any]] = {
            name: attrgetter(place) for name, place in places.items()
        }
        self._metrics = [(name, self._get.get(name)) for name in metrics if name not in _TYPES]

    def columns(self, part: _Part) -> StepColumns | None:
        """Return what lines say that are all of this shape; None: some are not, or may not be.

        Args:
            part: lines with as many colons as this shape.
        """
        data, edges = part.data, part.edges
        text, count = np.frombuffer(data, np.uint8), len(edges) - 1
        begun = (text[edges[:-1]] == ord("{")).all()
        if not begun or b"\\" in data or _wide(data, text, edges):
            return None
        try:
            lines = self._decoder.decode_lines(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
            return None
        rows, step = self._rows(lines), self._column(lines, "step", 0)
        # As each line begins with "{", which a value of a line may not be, a value begins there; so
        # with as many values as lines each has one.
        if len(lines) != count or not self._possible(lines, rows):
            return None
        nothing = np.full(count, np.nan)
        return StepColumns(
            place=part.places,
            step=step,
            tokens=self._column(lines, "tokens", 0),
            time=self._column(lines, "time", 0.0),
            rows=rows,
            metrics={
                name: nothing if get is None else np.array(list(map(get, lines)), np.float64)
                for name, get in self._metrics
            },
        )

    def _column(self, lines: Sequence[Any], name: str, default: Any) -> np.ndarray[Any, Any]:
        get = self._get.get(name)
        if get is None:
            return np.full(len(lines), default)
        return np.array(list(map(get, lines)), type(default))

    def _rows(self, lines: Sequence[Any]) -> np.ndarray[Any, Any]:
        get = self._get.get("rows")
        if get is None:
            return np.zeros((len(lines), 2), np.int64)
        numbers = chain.from_iterable(map(get, lines))
        return np.fromiter(numbers, np.int64, 2 * len(lines)).reshape(-1, 2)

    def _possible(self, lines: Sequence[Any], rows: np.ndarray[Any, Any]) -> bool:
        """Return whether the lines are steps, by what `Step` asks of one."""
        version, epoch = (self._column(lines, name, 1) for name in ("version", "epoch"))
        if "order" in self._get:
            orders = "".join(map(self._get["order"], lines))
            if ":" in orders:
                return False
        own = (rows == 0).all(1) & ("order" not in self._get)
        locked = (rows[:, 0] < rows[:, 1]) & (epoch == 1)
        return bool(np.where(version == 1, locked, own).all())


def _in_order(found: Sequence[_Found]) -> Iterator[StepColumns | Evaluation]:
    """Yield what lines say by their places."""
    steps = [each for each in found if isinstance(each, StepColumns)]
    others = sorted(
        (each for each in found if not isinstance(each, StepColumns)), key=lambda each: each[0]
    )
    if steps:
        all_ = steps[0] if len(steps) == 1 else _joined(steps)
        cuts = np.searchsorted(all_.place, [place for place, _ in others]).tolist()
    else:
        cuts = [0] * len(others)
    for number, (first, stop) in enumerate(pairwise([0, *cuts, None])):
        if steps and (stop is None or first < stop) and first < len(all_.place):
            yield _slice(all_, first, stop) if others else all_
        if number < len(others):
            yield others[number][1]


def _joined(steps: Sequence[StepColumns]) -> StepColumns:
    order = np.argsort(np.concatenate([each.place for each in steps]))

    def join(parts: Iterable[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        return np.concatenate(list(parts))[order]

    return StepColumns(
        place=join(each.place for each in steps),
        step=join(each.step for each in steps),
        tokens=join(each.tokens for each in steps),
        time=join(each.time for each in steps),
        rows=join(each.rows for each in steps),
        metrics={name: join(each.metrics[name] for each in steps) for name in steps[0].metrics},
        skipped=sorted(each for part in steps for each in part.skipped),
    )


def _slice(steps: StepColumns, first: int, stop: int | None) -> StepColumns:
    """Return some of the steps; the skipped ranges go with those whose rows they are among."""
    part = slice(first, stop)
    rows = steps.rows[part]
    low, high = rows.min(), rows.max()
    return StepColumns(
        place=steps.place[part],
        step=steps.step[part],
        tokens=steps.tokens[part],
        time=steps.time[part],
        rows=rows,
        metrics={name: values[part] for name, values in steps.metrics.items()},
        skipped=[each for each in steps.skipped if low <= each[0] < high],
    )


def _wide(data: bytes, text: np.ndarray[Any, Any], edges: np.ndarray[Any, Any]) -> bool:
    """Return whether an integer of lines without escapes has more than `MAX_DIGITS` digits."""
    runs, size = (text - np.uint8(ord("0"))) < 10, 1  # runs: of `size` digits that begin there
    while size <= MAX_DIGITS:
        step = min(size, MAX_DIGITS + 1 - size)
        runs = runs[:-step] & runs[step:]
        size += step
    for line in np.unique(np.searchsorted(edges, np.flatnonzero(runs), side="right")):
        outside = data[edges[line - 1] : edges[line]].split(b'"')[::2]
        if _INTEGER.search(b" ".join(outside)):
            return True
    return False
