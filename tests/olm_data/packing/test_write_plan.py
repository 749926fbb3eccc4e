"""Row plans of datasets of any size, in memory that does not grow with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing import peak
from support.small_datasets import write_dataset, write_sparse_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.packing.base import PackingCost
from olm_data.packing.packings import PACKINGS
from olm_data.packing.row_plan import documents


@pytest.mark.parametrize("packing", PACKINGS)
def test_planning_takes_the_same_memory_for_ten_times_the_documents(
    tmp_path: Path, packing: str
) -> None:
    peaks = []
    for shards in (2, 20):
        path = tmp_path / str(shards)
        write_sparse_dataset(path, shards=shards, tokens=1 << 20, documents=1 << 14)
        dataset = Dataset.open(str(path))
        some = documents(dataset, window=1 << 14)
        peaks.append(peak(PACKINGS[packing]().pack(dataset, some, 48, PackingCost())))
    assert peaks[1] < 1.1 * peaks[0]


@given(
    shards=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=4),
    window=st.integers(1, 12),
)
@settings(deadline=None, max_examples=20)
def test_windows_hold_all_documents_in_order(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]], window: int
) -> None:
    path = tmp_path_factory.mktemp("some")
    write_dataset(path, [[np.zeros(n, np.int64) for n in shard] for shard in shards])
    found = list(documents(Dataset.open(str(path)), window))
    sizes = [n for shard in shards for n in shard]
    assert [int(n) for _, lengths in found for n in lengths] == sizes
    starts = np.cumsum([0, *sizes])[:-1]
    assert [int(n) for first, _ in found for n in first] == starts.tolist()
    assert all(len(lengths) == window for _, lengths in found[:-1])
