"""Rows of packed sources, read: each token an input once an epoch, no leak between documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.forged import flip
from support.small_datasets import write_mixture

from olm_data.errors import ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.mixture.lock import Lock
from olm_data.rows.reader import RowReader

S = 8
LENGTHS = {  # in shards: longer than rows, exactly a row, one token; most are short
    "web": [[5, 3, 9, 24, 1, 1, 6], [1, 1, 1], [40, 8, 8, 8], [2, 30, 1]],
    "code": [[7] * 20, [64], [16, 16, 16]],
}


def numbered(name: str) -> list[list[np.ndarray]]:
    """Documents whose token ids are 1, 2, 3, ... over the source, so that an id tells its place."""
    following, shards = 1, []
    for lengths in LENGTHS[name]:
        shards.append([])
        for length in lengths:
            shards[-1].append(np.arange(following, following + length, dtype=np.uint32))
            following += length
    return shards


@pytest.fixture(params=["best_fit", "document"])
def lock(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_mixture(
        tmp_path,
        {name: numbered(name) for name in LENGTHS},
        stages=[(1600, {"web": 2, "code": 1})],
        sequence_length=S,
        dtypes={"code": "uint32"},
        packing=request.param,
    )


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_an_epoch_holds_each_token_once_and_labels_stay_in_their_document(
    lock: Path, parts: int
) -> None:
    reader, width = RowReader(lock), S // parts
    place = reader.schedule.locate(np.arange(reader.total_rows))
    for index, source in enumerate(reader.lock.sources):
        ends = np.cumsum([length for shard in LENGTHS[source.name] for length in shard])
        rows = np.flatnonzero((place.source == index) & (place.epoch == 0))
        assert len(rows) == source.rows
        batch = reader.read(rows, parts)
        assert batch.input_ids.shape == (len(rows) * parts, width)
        seen: list[int] = []
        for ids, labels, starts, positions in zip(
            batch.input_ids.tolist(),
            batch.labels.tolist(),
            batch.doc_start.tolist(),
            batch.positions.tolist(),
            strict=True,
        ):
            real = [i for i in ids if i]
            assert ids == real + [0] * (width - len(real))  # padding is at the end
            seen += real
            document = np.searchsorted(ends, real, side="left").tolist()
            for at, token in enumerate(real):
                ends_here = token in ends
                assert labels[at] == (-100 if ends_here else token + 1)
                first = at == 0 or document[at] != document[at - 1]
                assert starts[at] == (at if first else starts[at - 1])
                assert positions[at] == at - starts[at]
            assert labels[len(real) :] == [-100] * (width - len(real))
            assert starts[len(real) :] == [starts[len(real) - 1]] * (width - len(real))
        assert sorted(seen) == list(range(1, ends[-1] + 1))


def test_any_split_of_rows_into_batches_reads_the_same(lock: Path) -> None:
    reader = RowReader(lock)
    whole = reader.read(np.arange(60))
    windows = reader.prepare(np.arange(60))
    for i, j in ((0, 1), (1, 7), (7, 60)):
        part = windows.read(i, j)
        for name in ("input_ids", "labels", "doc_start", "positions"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[i:j])


def test_document_rows_hold_one_document_each(tmp_path: Path) -> None:
    lock = write_mixture(
        tmp_path,
        {"web": numbered("web")},
        stages=[(400, {"web": 1})],
        sequence_length=S,
        packing="document",
    )
    assert Lock.read(lock).sources[0].max_documents_per_row == 1
    assert (RowReader(lock).read(np.arange(20)).doc_start == 0).all()


def test_the_same_manifest_makes_the_same_plan_and_lock(lock: Path) -> None:
    again = write_mixture(
        lock.parent / "again",
        {name: numbered(name) for name in LENGTHS},
        stages=[(1600, {"web": 2, "code": 1})],
        sequence_length=S,
        dtypes={"code": "uint32"},
        packing=Lock.read(lock).packing.name,
    )
    assert Lock.read(again).digest == Lock.read(lock).digest


def test_verify_finds_a_changed_or_missing_row_plan(lock: Path) -> None:
    plan = Lock.read(lock).sources[1].plan
    path = lock.parent / plan.folder / "lengths.npy"
    flip(path)
    findings = {(f.file, f.field) for f in verify(str(lock)).findings}
    assert (str(path), "sha256") in findings
    path.unlink()
    findings = {(f.file, f.field) for f in verify(str(lock)).findings}
    assert (str(path), "file") in findings


def test_a_plan_that_is_gone_or_cut_is_refused_by_name(lock: Path) -> None:
    source = Lock.read(lock).sources[0]
    path = lock.parent / source.plan.folder / "starts.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValidationError, match=r"starts\.npy"):
        RowReader(lock)
    path.unlink()
    with pytest.raises(ValidationError, match=r"starts\.npy"):
        RowReader(lock)
