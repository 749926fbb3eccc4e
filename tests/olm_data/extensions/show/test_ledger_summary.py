"""The whole ledger: curves add up, and documents are told apart by what was learned of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.ledgers import Piece, write_ledger

from olm_data.errors import InputError, UsageError
from olm_data.extensions.show.ledger import summarise


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two epochs of five steps: all fall from 4 to 3, but document 0 stays and document 1 drops."""
    steps: dict[int, list[Piece]] = {}
    for step in range(1, 11):
        epoch, document = divmod(step - 1, 5)
        fallen = {0: 4.0, 1: 0.5}.get(document, 3.0) if epoch else 4.0
        steps[step] = [("web", document, 0, epoch, 10, fallen), ("code", step, 200, 0, 30, 1.0)]
    write_ledger(tmp_path, steps)  # type: ignore[arg-type]
    return tmp_path


def test_never_learned_and_memorised(run: Path) -> None:
    view = summarise(run, 1)
    assert (view.first, view.last, view.missing, view.pieces) == (1, 10, 0, 20)
    assert (view.labels, view.repeated) == (400, 5)
    (stayed,), (dropped,) = view.never_learned, view.memorised
    mean = (4.0 + 0.5 + 3 * 3.0) / 5
    assert (stayed.address, stayed.epochs, stayed.first, stayed.last) == ("web:0", 2, 4.0, 4.0)
    assert stayed.above == pytest.approx(4.0 - mean)
    assert (dropped.address, dropped.second) == ("web:1", 0.5)
    assert dropped.drop == pytest.approx(3.5 - (4.0 - mean))


def test_curves_by_source_and_position(run: Path) -> None:
    view = summarise(run, 1)
    assert view.until == [*range(1, 11)]
    code, web = sorted(view.sources, key=lambda curve: curve.name)
    assert (code.name, code.labels, code.losses) == ("code", 300, [1.0] * 10)
    assert web.losses == [4.0] * 6 + [0.5, 3.0, 3.0, 3.0]
    assert [curve.name for curve in view.positions] == ["0", "128 to 255"]
    assert view.positions[1].losses == [1.0] * 10


def test_one_source_and_what_is_not_finite(run: Path) -> None:
    write_ledger(run, {11: [("web", 9, 0, 1, 10, math.nan)], 12: [("web", 9, 0, 1, 10, 2.0)]})
    view = summarise(run, 5, "web")
    assert [curve.name for curve in view.sources] == ["web"]
    assert (view.pieces, view.not_finite, view.until) == (11, 1, [2, 4, 6, 8, 10, 12])
    with pytest.raises(UsageError, match="no source 'wab'"):
        summarise(run, 5, "wab")


def test_steps_that_are_missing_are_counted(tmp_path: Path) -> None:
    write_ledger(tmp_path, {1: [("a", 0, 0, 0, 10, 1.0)], 4: [("a", 0, 0, 0, 10, 1.0)]})
    assert summarise(tmp_path, 1).missing == 2
    with pytest.raises(InputError, match="no loss ledger"):
        summarise(tmp_path / "none", 1)
