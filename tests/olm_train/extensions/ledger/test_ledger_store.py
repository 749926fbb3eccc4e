"""The ledger in a remote save folder and that of a machine are the same after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ledgers import Piece, write_ledger

from olm_data.extensions.ledger.files import ledger_files, read_ledger
from olm_data.storage.store import Store
from olm_train.extensions.ledger.loss_ledger import LedgerSender, fetch_ledger


@pytest.fixture
def store(s3: dict[str, str], request: pytest.FixtureRequest) -> Store:
    return Store(f"s3://{s3['bucket']}/{request.node.name}")


def pieces(loss: float) -> list[Piece]:
    return [("web", 1, 0, 0, 10, loss)]


def losses(folder: Path) -> dict[int, float]:
    """Nats by step; each step once."""
    lines = [line for _, table in read_ledger(folder) for line in table.to_pylist()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["nats"] / 10 for line in lines}


def send(store: Store, folder: Path) -> None:
    LedgerSender(store).send([file.path for file in ledger_files(folder)])


def names(store: Store) -> list[str]:
    return [entry.name for entry in store.entries("ledger")]


def test_a_machine_without_it_gets_all_up_to_the_checkpoint(store: Store, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_ledger(here, {step: pieces(step) for step in range(1, 7)})
    send(store, here)
    there.mkdir()
    fetch_ledger(store, there, 3)
    assert losses(there) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert names(store) == [f"ledger/step0000000{n}-rank0000.parquet" for n in (1, 3)]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    fetch_ledger(store, elsewhere, 6)
    assert losses(elsewhere) == losses(there)  # what lies beyond is cut in the store too


def test_what_a_machine_has_of_a_lost_history_goes(store: Store, tmp_path: Path) -> None:
    here, stale = tmp_path / "here", tmp_path / "stale"
    write_ledger(here, {step: pieces(1.0) for step in range(1, 5)})
    send(store, here)
    write_ledger(stale, {step: pieces(9.0) for step in range(1, 3)})
    write_ledger(stale, {step: pieces(9.0) for step in range(2, 4)})
    fetch_ledger(store, stale, 4)
    assert losses(stale) == dict.fromkeys(range(1, 5), 1.0)


def test_a_new_run_begins_with_none_in_either_place(store: Store, tmp_path: Path) -> None:
    write_ledger(tmp_path, {1: pieces(1.0)})
    send(store, tmp_path)
    fetch_ledger(store, tmp_path, None)
    assert (names(store), ledger_files(tmp_path)) == ([], [])


def test_without_one_in_the_store_that_of_the_machine_is_cut(store: Store, tmp_path: Path) -> None:
    write_ledger(tmp_path, {step: pieces(1.0) for step in range(1, 5)})
    fetch_ledger(store, tmp_path, 2)
    assert sorted(losses(tmp_path)) == [1, 2]


def test_a_file_is_sent_once(store: Store, tmp_path: Path) -> None:
    write_ledger(tmp_path, {1: pieces(1.0)})
    sender, written = LedgerSender(store), [file.path for file in ledger_files(tmp_path)]
    sender.send(written)
    written[0].write_bytes(b"")
    sender.send(written)
    assert store.size(names(store)[0])
