"""Progress of long work: a live display on a terminal, else plain lines, or events as JSON Lines.

    share done, numbers -> terminal:     bar, percent, time left; the numbers below, as they fit
                        -> no terminal:  a line on standard error, at most every ten seconds
                        -> events:       a JSON object a line, about every second

Uses a monotonic clock only, and nothing it measures reaches any file of a dataset.

Also: how fast work goes now and how long it will take: a sliding window and a forecast. Pure.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import msgspec
import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from olm_data.counts import duration
from olm_data.errors import printable

WINDOW_SECONDS = 20.0
LEAST_STEP = 0.1


class RateWindow:
    """The rate of a growing amount over the last `seconds`.

    Args:
        seconds: width of the window. At most `seconds / LEAST_STEP` samples are kept.
    """

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self.seconds = seconds
        self._samples: deque[tuple[float, float]] = deque()
        self._changed = 0.0

    def add(self, now: float, amount: float) -> None:
        """Note that `amount` was done at the time `now`; times do not fall.

        An amount that falls (a worker died, its task begins again) begins the window anew.
        """
        samples = self._samples
        if not samples or amount != samples[-1][1]:
            self._changed = now
        if samples and amount < samples[-1][1]:
            samples.clear()
        if len(samples) > 1 and now - samples[-2][0] < LEAST_STEP:
            samples[-1] = (now, amount)
        else:
            samples.append((now, amount))
        while len(samples) > 2 and samples[1][0] <= now - self.seconds:
            samples.popleft()

    @property
    def rate(self) -> float:
        """Amount a second over the window; 0 while there is nothing to measure."""
        if len(self._samples) < 2:
            return 0.0
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last > first else 0.0

    @property
    def still(self) -> float:
        """Seconds since the amount last changed, as of the last sample."""
        return self._samples[-1][0] - self._changed if self._samples else 0.0


def forecast(
    planned: Sequence[int] | np.ndarray, finished: np.ndarray, text_bytes: np.ndarray
) -> tuple[float, float]:
    """Tell how much work is done and how much is left, in the same unit.

    The plan guesses sizes from file sizes. Once tasks are finished, the guesses for the rest are
    scaled by how wrong they were for these.

    Args:
        planned: int64 [tasks], guessed bytes of text; all 0 where the source cannot tell.
        finished: bool [tasks].
        text_bytes: int64 [tasks], bytes of text seen so far.

    Returns:
        (done, left), both at least 0; in tasks instead of bytes while no bytes can be told.
    """
    sizes = np.asarray(planned, np.float64)
    known = bool(sizes.any())
    weights = np.maximum(sizes, 1.0) if known else np.ones(len(sizes))
    seen = np.asarray(text_bytes, np.float64)
    of_finished = float(seen[finished].sum())
    if (finished.any() and of_finished == 0) or (not finished.any() and not known):
        return float(weights[finished].sum()), float(weights[~finished].sum())
    scale = of_finished / float(weights[finished].sum()) if finished.any() else 1.0
    left = np.maximum(weights * scale - seen, 0.0)[~finished]
    return float(seen.sum()), float(left.sum())


PLAIN_SECONDS = 10.0
EVENT_SECONDS = 1.0
REFRESH_A_SECOND = 4
MOST_LINES = 4
LEAST_BAR = 16  # with the percentage and what is between
INDENT = "  "


class Progress:
    """Shows how far a piece of work is.

    Args:
        label: what is being done, one word.
        stream: where people look; standard error by default.
        events: where to write JSON Lines instead, or None. Then `stream` stays silent.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        label: str,
        *,
        stream: TextIO | None = None,
        events: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self._clock = label, clock
        self._stream, self._events = stream or sys.stderr, events
        self._live: Live | None = None
        self._begin()

    def _begin(self) -> None:
        self._start = self._last = self._clock()
        self._shares = RateWindow()
        self._shares.add(0.0, 0.0)
        self._most = 0.0

    def __enter__(self) -> Progress:
        self._begin()
        if self._events is None and shows_live(self._stream):
            console = Console(file=self._stream, highlight=False)
            self._live = Live(console=console, refresh_per_second=REFRESH_A_SECOND, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return self._clock() - self._start

    def update(
        self,
        share: float,
        numbers: str | Sequence[str],
        *,
        left: float | None = None,
        facts: msgspec.Struct | None = None,
    ) -> None:
        """Show how much of the work is done.

        Args:
            share: 0 to 1. What is shown never falls, even where a better forecast says less.
            numbers: pieces of text such as rates, the most important first; a narrow terminal
                leaves out the last ones.
            left: seconds left, if the caller knows better than the recent growth of `share`.
            facts: the same in numbers, for events; `share` and `seconds` are added.
        """
        now = self._clock()
        self._shares.add(now - self._start, share)
        self._most = max(self._most, min(share, 1.0))
        if left is None and self._shares.rate > 0:
            left = max(0.0, 1.0 - share) / self._shares.rate
        pieces = [numbers] if isinstance(numbers, str) else list(numbers)
        if self._live is not None:
            self._live.update(_Display(self.label, self._most, left, pieces))
        elif self._events is not None:
            if now - self._last >= EVENT_SECONDS:
                self._last = now
                self.event(
                    "progress",
                    seconds=round(self.seconds, 3),
                    share=round(self._most, 4),
                    seconds_left=None if left is None else round(left, 1),
                    **(msgspec.to_builtins(facts) if facts else {}),
                )
        elif now - self._last >= PLAIN_SECONDS:
            self._last = now
            more = [] if left is None else [f"about {duration(left)} left"]
            self._write(f"{self.label}: " + ", ".join([f"{self._most:.0%}", *pieces, *more]))

    def note(self, text: str) -> None:
        """Show a line that stays; what names files in it cannot forge another line."""
        text, live = printable(text), self._live  # once: threads note things while it ends
        if live is not None:
            live.console.print(text, markup=False, soft_wrap=True)
        elif self._events is not None:
            self.event("note", text=text)
        else:
            self._write(text)

    def event(self, name: str, **facts: Any) -> None:
        """Write an event, if events are asked for: `{"event": name, ...}` on a line of its own."""
        if self._events is not None:
            write_event(self._events, name, **facts)

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def write_event(stream: TextIO, name: str, **facts: Any) -> None:
    """Write one event as a JSON object on a line of its own."""
    print(json.dumps({"event": name, **facts}), file=stream, flush=True)


def shows_live(stream: TextIO) -> bool:
    """Whether a display that redraws itself makes sense: a real terminal, and not a log of CI."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


class _Display:
    """The live display, laid out anew for the width it is drawn at."""

    def __init__(
        self, label: str, share: float, left: float | None, numbers: Sequence[str]
    ) -> None:
        self.label, self.share, self.left, self.numbers = label, share, left, numbers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 1  # some terminals wrap when the last column is written
        left = "" if self.left is None else f"{duration(self.left)} left"
        numbers = self.numbers
        if len(self.label) + len(left) + LEAST_BAR > width:
            left, numbers = "", [left, *self.numbers]
        line = Table.grid(padding=(0, 1), expand=False)
        line.width = width
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        line.add_column(no_wrap=True)
        bar = ProgressBar(total=1.0, completed=self.share)
        line.add_row(self.label, bar, f"{self.share:4.0%}", left)
        rest = [Text(INDENT + text) for text in fit(numbers, width - len(INDENT))]
        yield Group(line, *rest)


def fit(pieces: Sequence[str], width: int, lines: int = MOST_LINES - 1) -> list[str]:
    """Lay pieces out as lines of at most `width` characters, joined by ", " and never cut.

    Pieces that fit nowhere are left out, the last ones first; a first piece wider than the line is
    cut short.
    """
    rows: list[str] = []
    for piece in pieces:
        if rows and len(rows[-1]) + 2 + len(piece) <= width:
            rows[-1] += f", {piece}"
        elif len(rows) < lines and len(piece) <= width:
            rows.append(piece)
        elif not rows:
            rows.append(piece[: max(width - 1, 0)] + "\u2026")
    return rows
