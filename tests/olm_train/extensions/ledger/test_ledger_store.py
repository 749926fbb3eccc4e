"""Addresses of pieces lead to their tokens; the ledger is the same in a store and here."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.ledgers import Piece, write_ledger
from support.small_datasets import random_shards, write_mixture

from olm_data.extensions.ledger.files import ledger_files, read_ledger
from olm_data.mixture.lock import Lock
from olm_data.rows.reader import RowReader
from olm_data.storage.store import Store
from olm_train.extensions.ledger.loss_ledger import LedgerSender, PieceAddresses, fetch_ledger


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


LENGTH = 32


@pytest.fixture(scope="module", params=["concat", "best_fit", "document"])
def lock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of several shards, gone through more than once; the first stage in short rows."""
    rng = np.random.default_rng(3)
    shards = {
        name: random_shards(n, rng.integers(1, 60, (3, 40)).tolist()) for n, name in enumerate("ab")
    }
    return write_mixture(
        tmp_path_factory.mktemp(request.param),
        shards,
        stages=[(LENGTH * 200, {"a": 3, "b": 1}), (LENGTH * 150, {"a": 1, "b": 1})],
        sequence_length=LENGTH,
        packing=request.param,
        lengths=(8, LENGTH),
    )


def test_addresses_lead_to_the_tokens_of_the_batch(lock: Path) -> None:
    reader, addresses = RowReader(lock), PieceAddresses(Lock.read(lock))
    datasets = reader.lock.open_datasets()
    rows = np.random.default_rng(1).permutation(350)[:60].astype(np.int64)
    origin = reader.schedule.locate(rows)
    epochs = dict(zip(rows.tolist(), origin.epoch.tolist(), strict=True))
    for some, parts in ((rows[rows < 200], LENGTH // 8), (rows[rows >= 200], 1)):
        batch = reader.read(some, parts)
        size = batch.input_ids.size
        ends = np.append(batch.cu_seqlens[batch.cu_seqlens < size], size).astype(np.int64)
        labels, ids = batch.labels.reshape(-1), batch.input_ids.reshape(-1)
        real = [i for i, (a, b) in enumerate(pairwise(ends)) if (labels[a:b] >= 0).any()]
        begin = ends[:-1][real]
        none = np.zeros(len(real))
        found = addresses.entries(
            1, some, begin, np.diff(ends)[real], tokens=none.astype(np.int64), nats=none
        )
        for i, at in enumerate(begin.tolist()):
            dataset, number = datasets["ab".index(found.source[i])], int(found.document[i])
            assert dataset.shard_of(number)[0] == found.shard[i]
            assert found.row[i] == some[at // LENGTH]
            assert found.epoch[i] == epochs[int(found.row[i])]
            first, last = dataset.document_span(number)
            start, stop = int(found.start[i]), int(found.stop[i])
            assert 0 <= start < stop <= last - first
            # the ids are random: no other place of the dataset has them
            wanted = dataset.read(first + start, first + stop).tolist()
            assert ids[at : at + stop - start].tolist() == wanted
            # what is left of the piece is padding
            assert (labels[at + stop - start : ends[real[i] + 1]] == -100).all()
