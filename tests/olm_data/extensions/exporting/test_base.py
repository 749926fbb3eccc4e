"""What writers get: the documents of a shard in bounded batches, the kept columns, what is lost."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import random_shards, write_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.extensions.exporting.base import document_batches, kept_columns, lost_columns


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), most=st.integers(1, 60))
def test_batches_hold_each_document_once_and_no_more_tokens_than_asked(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], most: int
) -> None:
    folder = tmp_path_factory.mktemp("d")
    write_dataset(folder, random_shards(1, [lengths]))
    shard = Dataset.open(str(folder)).open_shard(0)
    ids: list[str] = []
    ends: list[int] = []
    for first, batch, rows in document_batches(shard, ["id"], most):
        assert first == (ends[-1] if ends else 0)
        assert len(batch) == rows.num_rows
        assert len(batch) == 1 or int(batch[-1]) - first <= most
        ends += batch.tolist()
        ids += rows.column("id").to_pylist()
    assert ends == shard.ends.tolist()
    assert ids == [f"doc-{n}" for n in range(len(lengths))]


def test_what_is_lost_names_the_kept_columns(tmp_path: Path) -> None:
    columns = {"score": pa.array([0.5]), "year": pa.array([2020])}
    write_dataset(tmp_path / "d", [[[1]]], columns=columns)
    dataset = Dataset.open(str(tmp_path / "d"))
    assert kept_columns(dataset) == ["score", "year"]
    assert lost_columns(dataset, ids=True, origins=True) == [
        "not in it: ids and file and line of each document",
        "not in it: kept columns score, year",
    ]
    assert lost_columns(dataset, ids=False, origins=False, kept=False) == []
