"""The loss ledger shown: steps, documents, all of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.ledgers import Piece, write_ledger

from olm_data.cli import cli
from olm_data.errors import InputError, UsageError
from olm_data.extensions.show.ledger import show_document_losses, show_step_losses, summarise


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


def show(*words: object) -> Result:
    return CliRunner().invoke(cli, ["show", "ledger", *map(str, words)])


@pytest.fixture
def shown_run(tmp_path: Path) -> Path:
    pieces = [("web", n, 0, 0, 10, 2.0 + n) for n in range(4)]
    again = [("web", n, 0, 1, 10, 1.0) for n in range(4)]
    write_ledger(tmp_path, {1: pieces, 2: [*again, ("code", 0, 0, 0, 5, 3.0)], 4: again})
    return tmp_path


def test_each_view_has_its_tables(shown_run: Path) -> None:
    text = show(shown_run, "--top", 2).output
    assert "missing   1\n" in text
    assert text.count("\n  web:") == 4
    assert "\n  code " not in show(shown_run, "--source", "web").output
    step = show(shown_run, "--step", 1, "--top", 1).output
    assert step.splitlines()[-1].split()[:5] == ["web:3", "0", "10", "10", "5.0000"]
    losses = [
        line.split()[4] for line in show(shown_run, "--document", "web:2").output.splitlines()[3:]
    ]
    assert losses == ["4.0000", "1.0000", "1.0000"]


def test_json_has_all_of_it(shown_run: Path) -> None:
    assert json.loads(show(shown_run, "--json").output)["repeated"] == 4
    assert json.loads(show(shown_run, "--step", 2, "--json").output)["labels"] == 45
    assert json.loads(show(shown_run, "--document", "web:1", "--json").output)["address"] == "web:1"


def test_options_that_would_have_no_effect_are_refused(shown_run: Path) -> None:
    error = show(shown_run, "--document", "web:1", "--step", 1).exception
    assert isinstance(error, UsageError)
    assert "--document is shown in all steps" in str(error)


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    """Two epochs of five steps: all fall from 4 to 3, but document 0 stays and document 1 drops."""
    steps: dict[int, list[Piece]] = {}
    for step in range(1, 11):
        epoch, document = divmod(step - 1, 5)
        fallen = {0: 4.0, 1: 0.5}.get(document, 3.0) if epoch else 4.0
        steps[step] = [("web", document, 0, epoch, 10, fallen), ("code", step, 200, 0, 30, 1.0)]
    write_ledger(tmp_path, steps)  # type: ignore[arg-type]
    return tmp_path


def test_never_learned_and_memorised(long_run: Path) -> None:
    view = summarise(long_run, 1)
    assert (view.first, view.last, view.missing, view.pieces) == (1, 10, 0, 20)
    assert (view.labels, view.repeated) == (400, 5)
    (stayed,), (dropped,) = view.never_learned, view.memorised
    mean = (4.0 + 0.5 + 3 * 3.0) / 5
    assert (stayed.address, stayed.epochs, stayed.first, stayed.last) == ("web:0", 2, 4.0, 4.0)
    assert stayed.above == pytest.approx(4.0 - mean)
    assert (dropped.address, dropped.second) == ("web:1", 0.5)
    assert dropped.drop == pytest.approx(3.5 - (4.0 - mean))


def test_curves_by_source_and_position(long_run: Path) -> None:
    view = summarise(long_run, 1)
    assert view.until == [*range(1, 11)]
    code, web = sorted(view.sources, key=lambda curve: curve.name)
    assert (code.name, code.labels, code.losses) == ("code", 300, [1.0] * 10)
    assert web.losses == [4.0] * 6 + [0.5, 3.0, 3.0, 3.0]
    assert [curve.name for curve in view.positions] == ["0", "128 to 255"]
    assert view.positions[1].losses == [1.0] * 10


def test_one_source_and_what_is_not_finite(long_run: Path) -> None:
    write_ledger(long_run, {11: [("web", 9, 0, 1, 10, math.nan)], 12: [("web", 9, 0, 1, 10, 2.0)]})
    view = summarise(long_run, 5, "web")
    assert [curve.name for curve in view.sources] == ["web"]
    assert (view.pieces, view.not_finite, view.until) == (11, 1, [2, 4, 6, 8, 10, 12])
    with pytest.raises(UsageError, match="no source 'wab'"):
        summarise(long_run, 5, "wab")


def test_steps_that_are_missing_are_counted(tmp_path: Path) -> None:
    write_ledger(tmp_path, {1: [("a", 0, 0, 0, 10, 1.0)], 4: [("a", 0, 0, 0, 10, 1.0)]})
    assert summarise(tmp_path, 1).missing == 2
    with pytest.raises(InputError, match="no loss ledger"):
        summarise(tmp_path / "none", 1)
