"""What the ledger says of a step and of a document: the piece that raised the loss comes first."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.ledgers import write_ledger

from olm_data.errors import InputError, UsageError
from olm_data.extensions.show.ledger import show_document_losses, show_step_losses


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten steps: web at 2 nats, code at 1; at step 8 document web:3 is at 9."""
    calm = [("web", 0, 0, 0, 10, 2.0), ("web", 1, 0, 0, 10, 2.0), ("code", 0, 0, 0, 20, 1.0)]
    steps = {step: list(calm) for step in range(1, 11)}
    steps[8].append(("web", 3, 128, 0, 10, 9.0))
    write_ledger(tmp_path, steps)
    write_ledger(tmp_path, {step: [("code", 5, 0, 1, 20, 1.0)] for step in range(1, 11)}, rank=1)
    return tmp_path


def test_a_spike_is_the_document_that_it_was(run: Path) -> None:
    view = show_step_losses(run, 8, 2)
    assert (view.ranks, view.world_size, view.pieces, view.labels) == (2, 2, 5, 70)
    assert (view.loss, len(view.top)) == (pytest.approx((20 * 2 + 40 * 1 + 10 * 9) / 70), 2)
    top = view.top[0]
    assert (top.address, top.start, top.stop, top.loss, top.usual) == ("web:3", 128, 138, 9.0, 2.0)
    assert top.excess == pytest.approx(70.0)
    assert [one.source for one in view.sources] == ["web", "code"]
    assert view.sources[0].excess == pytest.approx(70.0)
    assert view.sources[1].excess == pytest.approx(0.0)


def test_one_source_of_a_step(run: Path) -> None:
    view = show_step_losses(run, 8, 9, "code")
    assert {piece.address for piece in view.top} == {"code:0", "code:5"}
    with pytest.raises(UsageError, match="no source 'wob'"):
        show_step_losses(run, 8, 9, "wob")


def test_pieces_that_are_not_finite_come_first(tmp_path: Path) -> None:
    pieces = [("a", 0, 0, 0, 4, 50.0), ("a", 1, 0, 0, 4, math.nan), ("a", 2, 0, 0, 4, 1.0)]
    write_ledger(tmp_path, {1: pieces})
    view = show_step_losses(tmp_path, 1, 3)
    assert [piece.address for piece in view.top] == ["a:1", "a:0", "a:2"]
    assert (view.not_finite, view.labels, view.loss) == (1, 8, 25.5)
    assert view.top[1].usual is None


def test_a_document_is_shown_each_time_it_was_seen(run: Path) -> None:
    view = show_document_losses(run, "web:3")
    assert [(piece.step, piece.loss) for piece in view.pieces] == [(8, 9.0)]
    assert view.pieces[0].usual == pytest.approx((40 + 90) / 30)
    assert [piece.step for piece in show_document_losses(run, "web:0").pieces] == [*range(1, 11)]


@pytest.mark.parametrize("address", ["web", "web:x", "17"])
def test_what_is_no_address_is_refused(run: Path, address: str) -> None:
    with pytest.raises(UsageError, match="not the address"):
        show_document_losses(run, address)


def test_what_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no piece of 'web:9'"):
        show_document_losses(run, "web:9")
    with pytest.raises(UsageError, match="no step 11"):
        show_step_losses(run, 11, 3)
    with pytest.raises(InputError, match="no loss ledger"):
        show_step_losses(tmp_path / "none", 1, 3)
