"""Row plans: every token of every chosen document, in rows that never mix up where it came from."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.packing import documents, rows_of

from olm_data.errors import ValidationError
from olm_data.packing.base import PackingCost
from olm_data.packing.best_fit import pack_best_fit
from olm_data.packing.row_plan import RowPlan, write
from olm_data.storage.store import Store


def test_a_stored_plan_is_the_plan(tmp_path: Path) -> None:
    starts, sizes = documents([5, 3, 9, 20, 1, 2])
    parts = [
        part
        for a, b in ((0, 3), (3, 6))
        for part in pack_best_fit(starts[a:b], sizes[a:b], 8, key=1, min_tail=1, cost=PackingCost())
    ]
    rows, pieces = write(tmp_path, parts)
    sha256 = RowPlan.digests(tmp_path)
    plan = RowPlan.open(Store(tmp_path), rows, pieces, sha256)
    assert [plan.pieces(r) for r in range(plan.rows)] == rows_of(parts)
    for name in ("starts.npy", "lengths.npy", "ends.npy"):
        data = (tmp_path / name).read_bytes()
        for broken in (data[:-1], data[:100], b""):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(ValidationError, match="missing or damaged"):
                RowPlan.open(Store(tmp_path), rows, pieces, sha256)
        (tmp_path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ValidationError, match="its digest is not the one in the lock"):
            RowPlan.open(Store(tmp_path), rows, pieces, sha256)
        RowPlan.open(Store(tmp_path), rows, pieces, sha256, verify="off")
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValidationError, match="bytes, not 136"):
        RowPlan.open(Store(tmp_path), 1, pieces, sha256)


def test_a_remote_plan_is_mapped_from_a_copy_that_takes_no_space_afterwards(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, sizes = documents([5, 3, 9, 20, 1, 2])
    parts = list(pack_best_fit(starts, sizes, 8, key=1, min_tail=1, cost=PackingCost()))
    made, space = tmp_path / "made", tmp_path / "space"
    made.mkdir()
    space.mkdir()
    rows, pieces = write(made, parts)
    sha256 = RowPlan.digests(made)
    store = Store(f"s3://{s3['bucket']}/row-plans/one")
    for name, digest in sha256.items():
        store.publish(name, made / name, digest)
    monkeypatch.setattr(tempfile, "tempdir", str(space))
    plan = RowPlan.open(store, rows, pieces, sha256)
    memory = plan.starts
    while isinstance(memory, np.ndarray):
        memory = memory.base
    assert isinstance(memory, mmap.mmap)
    assert list(space.iterdir()) == []
    assert [plan.pieces(r) for r in range(plan.rows)] == rows_of(parts)
    with pytest.raises(ValidationError, match="its digest is not the one in the lock"):
        RowPlan.open(store, rows, pieces, {**sha256, "ends.npy": sha256["starts.npy"]})
    store.delete("lengths.npy")
    with pytest.raises(ValidationError, match="missing or damaged"):
        RowPlan.open(store, rows, pieces, sha256)
