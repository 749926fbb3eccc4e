"""Progress of long work, on standard error: a bar on a terminal, else plain lines.

    counts (documents, bytes of text, tokens) + share done  ->  rate, time left

Uses a monotonic clock only, and nothing it measures reaches any file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

PLAIN_SECONDS = 10.0


class Progress:
    """Shows how far a run is.

    Args:
        label: what is being done, one word.
        stream: where to write; standard error by default.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        label: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self._clock = label, clock
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self._bar: RichProgress | None = None
        self._start = self._last = clock()

    def __enter__(self) -> Progress:
        self._start = self._last = self._clock()
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._bar.add_task(self.label, total=1.0, numbers="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return self._clock() - self._start

    def update(self, share: float, numbers: str) -> None:
        """Show that `share` (0 to 1) of the work is done; `numbers` is text such as rates."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=share, numbers=numbers)
            return
        now = self._clock()
        if now - self._last >= PLAIN_SECONDS:
            self._last = now
            left = ""
            if share > 0.01:
                left = f", about {duration((now - self._start) * (1 - share) / share)} left"
            self._write(f"{self.label}: {share:.0%}, {numbers}{left}")

    def note(self, text: str) -> None:
        """Show a line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        else:
            self._write(text)

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def rates(documents: int, text_bytes: int, tokens: int, seconds: float) -> str:
    """Return `1,234 documents, 12.3 MB/s of text, 3.1 M tokens/s`."""
    seconds = max(seconds, 1e-9)
    return (
        f"{documents:,} documents, {text_bytes / seconds / 1e6:.1f} MB/s of text, "
        f"{scaled(tokens / seconds)} tokens/s"
    )


def scaled(number: float) -> str:
    """Return a number with three digits and a suffix: `12.3 M`."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {suffix}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Return seconds in words: `42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
