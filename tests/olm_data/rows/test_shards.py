"""Shards are opened on demand, as many as the process may open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.small_datasets import (
    mix_datasets,
    write_sparse_dataset,
)

from olm_data.dataset.dataset import Dataset
from olm_data.rows.reader import RowReader


def test_as_many_shards_stay_open_as_the_process_may_open(tmp_path: Path) -> None:
    program = (
        "import resource, sys, numpy as np\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))\n"
        "from olm_data.rows.reader import RowReader\n"
        "reader = RowReader(sys.argv[1])\n"
        "batch = reader.read(np.arange(300))\n"
        "print(batch.labels.shape)\n"
    )
    write_sparse_dataset(tmp_path / "a", shards=100, tokens=300, documents=3)
    write_sparse_dataset(tmp_path / "b", shards=100, tokens=301, documents=3)
    lock = mix_datasets(
        tmp_path, ["a", "b"], stages=[(30_000, {"a": 1, "b": 1})], sequence_length=100
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(lock)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == "(300, 100)\n"


def test_a_batch_of_a_huge_mixture_opens_only_the_shards_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_sparse_dataset(tmp_path / name, shards=1000, tokens=10**9, documents=1000)
    lock = mix_datasets(
        tmp_path, ["a", "b"], stages=[(10**12, {"a": 1, "b": 1})], sequence_length=2048
    )
    opened = []
    open_shard = Dataset.open_shard
    monkeypatch.setattr(
        Dataset, "open_shard", lambda self, i: opened.append(i) or open_shard(self, i)
    )
    reader = RowReader(lock)
    assert opened == []
    rows = np.arange(16) + reader.total_rows - 16
    batch = reader.read(rows)
    assert 1 < len(opened) <= 16
    # documents of 10^6 tokens: the cuts follow from the place of the row alone
    start = reader.schedule.locate(rows).row * 2048
    cuts = (start[:, None] + np.arange(1, 2049)) % 10**6 == 0
    np.testing.assert_array_equal(batch.labels == -100, cuts)
