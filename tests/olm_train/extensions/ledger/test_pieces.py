"""Addresses of pieces lead to the tokens that were trained, whatever the packing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.small_datasets import random_shards, write_mixture

from olm_data.mixture.lock import Lock
from olm_data.rows.reader import RowReader
from olm_train.extensions.ledger.loss_ledger import PieceAddresses

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
        found = addresses.of(some, begin, np.diff(ends)[real])
        names, shards = addresses.source_names(found), addresses.shard_names(found)
        for i, at in enumerate(begin.tolist()):
            dataset, number = datasets["ab".index(names[i])], int(found.document[i])
            assert dataset.shard_of(number)[0] == shards[i]
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
