"""Progress: plain lines now and then off a terminal, a bar on one, honest numbers."""

from __future__ import annotations

import io
import json
import os
import pty
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from olm_data.progress import LEAST_STEP, Progress, RateWindow, _Display, fit, forecast, shows_live


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
    assert (len(lines), lines[0]) == (4, "tokenize: 12%, 9 documents, about 1 min 10 s left")
    assert progress.seconds == 40


def test_without_a_terminal_nothing_redraws_and_notes_are_lines() -> None:
    stream = io.StringIO()
    with Progress("verify", stream=stream, clock=Clock()) as progress:
        progress.update(0.5, "9 documents")
        progress.note("a worker died [SIGKILL] on a\n\x1b[2J.jsonl")
    assert stream.getvalue() == r"a worker died [SIGKILL] on a\n\x1b[2J.jsonl" + "\n"


@pytest.fixture
def interactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("interactive")
def test_on_a_terminal_a_bar_shows_share_and_numbers_and_notes_stay() -> None:
    stream = Terminal()
    with Progress("tokenize", stream=stream, clock=Clock()) as progress:
        progress.update(0.5, ["9 documents", "2 workers"])
        progress.note("a worker died [SIGKILL]")
    assert "\x1b[" in stream.getvalue()
    assert " 50%" in stream.getvalue()
    assert "9 documents, 2 workers" in stream.getvalue()
    assert "a worker died [SIGKILL]" in stream.getvalue()


@pytest.mark.usefixtures("interactive")
@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_logs_of_ci_and_dumb_terminals_get_plain_lines(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shows_live(Terminal())
    monkeypatch.setenv(name, value)
    assert not shows_live(Terminal())
    assert not shows_live(io.StringIO())


@given(st.lists(st.text("abc ", min_size=1, max_size=30), max_size=12), st.integers(4, 120))
def test_pieces_are_laid_out_within_the_width_and_never_cut_but_for_a_lone_first(
    pieces: list[str], width: int
) -> None:
    rows = fit(pieces, width)
    assert all(len(row) <= width for row in rows)
    assert len(rows) <= 3
    shown = [piece for row in rows for piece in row.split(", ")]
    assert all(piece in pieces for piece in shown if not piece.endswith("\u2026"))
    if sum(len(piece) + 2 for piece in pieces) <= width:
        assert rows == ([", ".join(pieces)] if pieces else [])


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120, 200])
def test_the_display_fits_every_width_and_shows_share_and_time_left(width: int) -> None:
    stream = io.StringIO()
    pieces = ["12.3 MB/s of text", "3.1 M tokens/s", "1,234,567 documents", "12 dropped (3 bad)"]
    pieces += ["27 of 64 shards", "read 12% encode 80% write 8%", "16 workers"]
    console = Console(file=stream, width=width, force_terminal=True, no_color=True)
    console.print(_Display("tokenize", 0.42, 7500.0, pieces))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert all(len(line.rstrip()) < width for line in lines)
    assert len(lines) <= 4
    assert "42%" in lines[0]
    if width >= 40:
        assert "2 h 05 min left" in lines[0]
        assert "12.3 MB/s of text" in lines[1]
    if width >= 80:
        assert "16 workers" in lines[-1]


def test_a_pseudo_terminal_is_redrawn_and_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stream:
        with Progress("tokenize", stream=stream) as progress:
            for step in range(20):
                progress.update(step / 20, ["9 documents"])
        print("made", file=stream, flush=True)
        shown = ""
        while not shown.endswith("made\r\n"):  # a read returns what has come so far
            shown += os.read(ours, 1 << 20).decode()
    os.close(ours)
    assert "9 documents" in shown
    assert "\x1b[2K" in shown.rsplit("9 documents", 1)[1]  # the display is erased at the end


def test_events_come_about_every_second_as_json_lines_and_nothing_else_is_written() -> None:
    clock, stream, events = Clock(), Terminal(), io.StringIO()
    with Progress("tokenize", stream=stream, events=events, clock=clock) as progress:
        progress.event("start", shards=3)
        for step in range(1, 41):
            clock.now = 100.0 + step / 4
            progress.update(step / 80, "9 documents", facts={"documents": step})
        progress.note("line\nbreak")
    lines = [json.loads(line) for line in events.getvalue().splitlines()]
    assert stream.getvalue() == ""
    assert lines[0] == {"event": "start", "shards": 3}
    assert lines[-1] == {"event": "note", "text": r"line\nbreak"}
    assert [line["documents"] for line in lines[1:-1]] == list(range(4, 41, 4))
    assert lines[4] == {
        "event": "progress",
        "seconds": 4.0,
        "share": 0.2,
        "seconds_left": 16.0,
        "documents": 16,
    }


def test_the_share_shown_never_falls() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("tokenize", stream=stream, clock=clock) as progress:
        for second, share in ((11, 0.5), (22, 0.4), (33, 0.6)):
            clock.now = 100.0 + second
            progress.update(share, "x", left=1.0)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["50%,", "50%,", "60%,"]


def test_a_thread_may_note_something_while_the_display_ends() -> None:
    stream = Terminal()

    class Ending(Progress):
        """Another thread ends the display as soon as this one has looked at it."""

        def __getattribute__(self, name: str) -> object:
            found = super().__getattribute__(name)
            if name == "_live" and found is not None:
                self._live = None
            return found

    progress = Ending("tokenize", stream=stream)
    progress._live = Live(console=Console(file=stream))
    progress.note("the lease was given back")
    assert "the lease was given back" in stream.getvalue()


# Promises of the sliding window and the forecast: recent speed, and bytes that add up.
steps = st.lists(st.tuples(st.floats(0.001, 5), st.integers(0, 10**9)), min_size=1, max_size=200)


@given(rate=st.floats(0.1, 1e9), gaps=st.lists(st.floats(0.01, 3), min_size=2, max_size=100))
def test_a_steady_amount_has_its_rate_whatever_the_times_of_looking(
    rate: float, gaps: list[float]
) -> None:
    window, now = RateWindow(5), 0.0
    window.add(0.0, 0.0)
    for gap in gaps:
        now += gap
        window.add(now, rate * now)
    assert (window.rate, window.still) == (pytest.approx(rate, rel=1e-6), 0)


@given(steps)
def test_the_rate_is_never_negative_and_memory_is_bounded(steps: list[tuple[float, int]]) -> None:
    window, now = RateWindow(5), 0.0
    for gap, amount in steps:  # amounts fall, too: a worker died and its task began again
        now += gap
        window.add(now, amount)
        assert window.rate >= 0
        assert window.still >= 0
        assert len(window._samples) <= 2 * 5 / LEAST_STEP + 3


def test_only_the_last_seconds_count() -> None:
    window = RateWindow(10)
    for second in range(100):
        window.add(second, 1000 * second if second < 50 else 50_000 + second)
    assert window.rate == pytest.approx(1.0)
    for second in range(100, 130):
        window.add(second, 50_099)
    assert (window.rate, window.still) == (0, 30)


tasks = st.lists(
    st.tuples(st.integers(0, 10**12), st.booleans(), st.integers(0, 10**12)), min_size=1
)


@given(tasks)
def test_a_forecast_is_finite_and_ends_at_nothing_left(tasks: list[tuple[int, bool, int]]) -> None:
    planned, finished, seen = (np.array(column) for column in zip(*tasks, strict=True))
    done, left = forecast(planned, finished, seen)
    assert done >= 0
    assert left >= 0
    assert np.isfinite([done, left]).all()
    assert forecast(planned, np.ones(len(tasks), bool), seen)[1] == 0


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=50), st.floats(0.1, 10))
def test_wrong_guesses_are_scaled_by_the_finished_tasks(planned: list[int], wrong: float) -> None:
    sizes = np.array(planned, np.float64)
    finished = np.arange(len(sizes)) < len(sizes) // 2
    done, left = forecast(sizes, finished, np.where(finished, sizes * wrong, 0))
    assert done + left == pytest.approx(sizes.sum() * wrong)


def test_sources_without_sizes_count_by_tasks() -> None:
    unknown, none = np.zeros(4, np.int64), np.zeros(4, bool)
    assert forecast(unknown, none, np.array([5, 0, 0, 0])) == (0, 4)
    first = np.array([True, False, False, False])
    assert forecast(unknown, first, np.array([100, 50, 0, 0])) == (150, 250)
