"""Curves of any length are a bounded number of points, sent piece by piece without a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ledgers import Piece, write_ledger

from olm_data.extensions.ledger.files import keep_until, ledger_files
from olm_data.extensions.report.curves import (
    MOST_POINTS,
    MOST_SOURCES,
    POINTS,
    Curves,
    LedgerCurve,
    LedgerTail,
    Points,
)
from olm_data.extensions.watching.follow import StepColumns


def columns(
    steps: Sequence[int], values: Sequence[float] | np.ndarray, place: int = 1
) -> StepColumns:
    """Steps with one metric, whose lines stand at `place` times their number."""
    step = np.array(steps, np.int64)
    nothing = np.zeros(len(step))
    rows = np.zeros((len(step), 2), np.int64)
    return StepColumns(place * step, step, step, nothing, rows, {"a": np.array(values)})


def joined(old: Points | None, new: Points) -> Points:
    """What a page makes of what it has and what comes."""
    if old is None or new.first == 0 or old.size != new.size:
        return new
    return Points(
        first=0,
        size=new.size,
        steps=old.steps[: new.first] + new.steps,
        tokens=old.tokens[: new.first] + new.tokens,
        time=old.time[: new.first] + new.time,
        values={n: old.values[n][: new.first] + v for n, v in new.values.items()},
        low={n: old.low[n][: new.first] + v for n, v in new.low.items()},
        high={n: old.high[n][: new.first] + v for n, v in new.high.items()},
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=8))
def test_pieces_together_are_the_whole(growth: list[int]) -> None:
    curves, page, step = Curves(["a"]), None, 0
    for more in growth:
        new = range(step + 1, step + more + 1)
        curves.extend(columns(new, [math.sin(n) if n % 3 else math.nan for n in new]))
        step += more
        size, have = (page.size, len(page.steps)) if page else (0, 0)
        page = joined(page, curves.points(range(len(curves)), size, have))
        assert page == curves.points(range(len(curves)))


def test_a_million_steps_are_few_points_and_no_spike_is_lost() -> None:
    curves = Curves(["a"])
    values = np.full(1_000_000, 2.0)
    values[777_776] = 99.0
    curves.extend(columns(range(1, 1_000_001), values))
    points = curves.points(range(len(curves)))
    assert points.size == 512
    assert len(points.steps) == -(-1_000_000 // 512) <= MOST_POINTS
    assert max(v for v in points.high["a"] if v is not None) == 99.0
    close = curves.points(curves.between(777_000, 778_000))
    assert (close.size, close.values["a"][777]) == (1, 99.0)
    again = curves.points(range(len(curves)), points.size, len(points.steps))
    assert len(again.steps) == 1


def test_a_step_is_found_by_its_number_or_the_one_before() -> None:
    curves = Curves(["a"])
    assert curves.place(1) is None
    curves.extend(columns([1, 2, 5], [1.0, 2.0, 5.0], place=100))
    assert [curves.place(step) for step in (0, 1, 4, 5, 9)] == [100, 100, 200, 500, 500]
    assert curves.last("a", 2) == 3.5


# The curves of a ledger are the sums of its pieces, however they were read.
FOREVER = float("inf")


def step_pieces(step: int) -> list[Piece]:
    return [("web", step, 0, 0, 10, 2.0 + step), ("books", step, 300, 0, 30, 1.0)]


def test_each_source_and_place_has_a_curve(tmp_path: Path) -> None:
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    assert tail.curves() is None
    write_ledger(tmp_path, {step: step_pieces(step) for step in (1, 2, 3)})
    write_ledger(tmp_path, {3: [("web", 9, 5, 0, 10, 9.0)]}, rank=1)
    tail.read(FOREVER)
    curves = tail.curves()
    assert curves.until == [1, 2, 3]
    assert curves.sources == [
        LedgerCurve("books", [1.0, 1.0, 1.0]),
        LedgerCurve("web", [3.0, 4.0, 7.0]),  # of both ranks
    ]
    assert curves.positions == [
        LedgerCurve("0", [3.0, 4.0, 5.0]),
        LedgerCurve("1 to 127", [None, None, 9.0]),
        LedgerCurve("256 to 511", [1.0, 1.0, 1.0]),
    ]


def test_read_bit_by_bit_it_is_what_it_is_as_a_whole(tmp_path: Path) -> None:
    slow, seen = LedgerTail(tmp_path), 0
    for first in range(1, 2 * POINTS + 40, 100):
        write_ledger(tmp_path, {step: step_pieces(step) for step in range(first, first + 100)})
        slow.read(-1.0)  # one that has no time
        assert slow.more
        slow.read(FOREVER)
        assert slow.changes > seen
        seen = slow.changes
    whole = LedgerTail(tmp_path)
    whole.read(FOREVER)
    assert slow.curves() == whole.curves()
    curves = whole.curves()
    assert len(curves.until) <= POINTS
    assert curves.until[:2] == [4, 8]
    assert curves.sources[1].losses[0] == 2.0 + (1 + 2 + 3 + 4) / 4
    whole.read(FOREVER)
    assert whole.changes == len(ledger_files(tmp_path))  # nothing is read twice


def test_what_a_resume_cut_off_is_gone(tmp_path: Path) -> None:
    write_ledger(tmp_path, {step: step_pieces(step) for step in range(1, 9)})
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    keep_until(tmp_path, 3)
    tail.read(FOREVER)
    curves = tail.curves()
    assert curves.until == [1, 2, 3]


def test_many_sources_are_some_curves_and_a_rest(tmp_path: Path) -> None:
    pieces: list[Piece] = [(f"s{n}", n, 0, 0, 40 - n, 1.0 + n) for n in range(MOST_SOURCES + 2)]
    write_ledger(tmp_path, {1: pieces})
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    curves = tail.curves()
    assert [curve.name for curve in curves.sources][-2:] == ["s7", "2 other sources"]
    assert curves.sources[-1].losses == [pytest.approx((32 * 9.0 + 31 * 10.0) / 63, rel=1e-5)]


def test_a_file_that_is_no_ledger_is_said_and_left_out(tmp_path: Path) -> None:
    write_ledger(tmp_path, {1: step_pieces(1)})
    (tmp_path / "ledger/step00000003-rank0000.parquet").write_bytes(b"PAR1")
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    assert "step00000003-rank0000.parquet cannot be read" in tail.wrong
    curves = tail.curves()
    assert curves.until == [1]
