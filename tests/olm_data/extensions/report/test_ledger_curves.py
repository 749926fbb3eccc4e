"""The curves of a ledger are the sums of its pieces, however they were read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ledgers import Piece, write_ledger

from olm_data.extensions.ledger.files import keep_until, ledger_files
from olm_data.extensions.report.curves import MOST_SOURCES, POINTS, LedgerCurve, LedgerTail

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
    assert curves is not None
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
    assert curves is not None
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
    assert curves is not None
    assert curves.until == [1, 2, 3]


def test_many_sources_are_some_curves_and_a_rest(tmp_path: Path) -> None:
    pieces: list[Piece] = [(f"s{n}", n, 0, 0, 40 - n, 1.0 + n) for n in range(MOST_SOURCES + 2)]
    write_ledger(tmp_path, {1: pieces})
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    curves = tail.curves()
    assert curves is not None
    assert [curve.name for curve in curves.sources][-2:] == ["s7", "2 other sources"]
    assert curves.sources[-1].losses == [pytest.approx((32 * 9.0 + 31 * 10.0) / 63, rel=1e-5)]


def test_a_file_that_is_no_ledger_is_said_and_left_out(tmp_path: Path) -> None:
    write_ledger(tmp_path, {1: step_pieces(1)})
    (tmp_path / "ledger/step00000003-rank0000.parquet").write_bytes(b"PAR1")
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    assert "step00000003-rank0000.parquet cannot be read" in tail.wrong
    curves = tail.curves()
    assert curves is not None
    assert curves.until == [1]
