"""Progress: plain lines now and then off a terminal, a bar on one, honest numbers."""

from __future__ import annotations

import io

import pytest

from olm_data.progress import Progress, duration, rates, scaled


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_off_a_terminal_a_plain_line_comes_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("tokenize", stream=stream, clock=clock) as progress:
        for second in range(1, 41):
            clock.now = 100.0 + second
            progress.update(second / 80, "9 documents")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "tokenize: 12%, 9 documents, about 1 min 10 s left"
    assert progress.seconds == 40


def test_on_a_terminal_a_bar_shows_share_and_numbers_and_notes_stay() -> None:
    stream = Terminal()
    with Progress("tokenize", stream=stream, clock=Clock()) as progress:
        progress.update(0.5, "9 documents")
        progress.note("a worker died [SIGKILL]")
    assert "\x1b[" in stream.getvalue()
    assert "a worker died [SIGKILL]" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (42, "42 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_rates_are_scaled() -> None:
    assert rates(1200, 50_000_000, 12_345_678, 2.0) == (
        "1,200 documents, 25.0 MB/s of text, 6.17 M tokens/s"
    )
    assert [scaled(n) for n in (0.5, 999, 1e4, 2.5e9, 1e12)] == [
        "0.5",
        "999",
        "10 K",
        "2.5 B",
        "1 T",
    ]
