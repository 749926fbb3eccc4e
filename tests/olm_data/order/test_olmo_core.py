"""Order `olmo-core`: the very batches of OLMo-core's own loader, written down by it.

tests/support/foreign/olmo-core.json.gz holds what ai2-olmo-core 3.0.0 gave for two raw files: three
epochs of batches, with and without chunks; make.py beside it says how.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.stand_in import parse_mixture

from olm_data.errors import UsageError, ValidationError
from olm_data.extensions.importing.import_files import import_files
from olm_data.extensions.verify.datasets import verify
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.mixture.summary import summarise
from olm_data.order.olmo_core import OlmoCore, shuffled, shuffled_positions
from olm_data.order.schedule import Schedule, ScheduleStage
from olm_data.order.shuffled import Shuffled
from olm_data.rows.reader import RowReader
from olm_data.rows.views import LockRows
from olm_data.tokenizer.tokenizer import load_tokenizer

FOREIGN = Path(__file__).parents[2] / "support" / "foreign"
CASES: list[dict[str, Any]] = json.loads(
    gzip.decompress((FOREIGN / "olmo-core.json.gz").read_bytes())
)


def mixed(folder: Path, case: dict[str, Any]) -> Path:
    """Import the two files and mix three epochs of them."""
    folder.mkdir(exist_ok=True)
    files = ["dolma/part-0-00000.npy", "dolma/part-0-00000.csv.gz"]
    for name in files:
        shutil.copy(FOREIGN / name, folder)
    shutil.copy(FOREIGN / "datatrove" / "text_00000_unshuffled.ds", folder / "second.npy")
    import_files(
        [str(folder / "part-0-00000.npy"), str(folder / "second.npy")],
        str(folder / "data"),
        load_tokenizer(FOREIGN / "tokenizer.json"),
        dtype="uint16",
    )
    rows = sum(len(batch[0]) for batch in case["batches"])
    manifest = {
        "version": 1,
        "seed": case["seed"],
        "sequence_length": case["sequence_length"],
        "order": "olmo-core",
        "batch_rows": case["batch_rows"],
        "chunk_rows": case["chunk_rows"],
        "sources": {"all": {"data": "./data", "max_epochs": 3}},
        "stages": [
            {"name": "a", "tokens": 100 * case["sequence_length"], "weights": {"all": 1}},
            {"name": "b", "tokens": (rows - 100) * case["sequence_length"], "weights": {"all": 1}},
        ],
    }
    path = folder / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest, sort_keys=False))
    return Path(mix(str(path)).path)


@pytest.mark.parametrize("case", CASES, ids=["chunks of one", "chunks of four"])
def test_each_batch_of_three_epochs_is_that_of_olmo_core(
    case: dict[str, Any], tmp_path: Path
) -> None:
    lock = mixed(tmp_path / "m", case)
    reader, size = RowReader(lock, verify="full"), case["batch_rows"]
    assert reader.lock.sources[0].rows == case["instances"]
    assert reader.total_rows == size * len(case["batches"])
    ends = 0
    for step, (index, ids, labels) in enumerate(case["batches"]):
        rows = np.arange(step * size, (step + 1) * size)
        assert reader.schedule.locate(rows).row.tolist() == index
        batch = reader.read(rows)
        assert batch.input_ids.tolist() == ids
        # what we train on they do, too; they also train on the first token after each document
        ours, theirs = batch.labels, np.array(labels)
        assert np.array_equal(np.where(ours == -100, theirs, ours), theirs)
        masked = (ours == -100) & (theirs != -100)
        assert (batch.input_ids[masked] == 256).all()
        assert (ours[:, -1] == -100).all()
        ends += int(masked.sum())
    assert ends > 100
    assert verify(str(lock)).ok


def test_locate_and_peek_agree_with_the_reader(tmp_path: Path) -> None:
    lock = Lock.read(mixed(tmp_path / "m", CASES[0]))
    schedule, reader = lock.schedule(), RowReader(lock)
    everything = schedule.locate(np.arange(schedule.total_rows))
    for row in range(lock.sources[0].rows):
        wanted = np.flatnonzero(everything.row == row)
        assert schedule.rows_of(0, row).tolist() == wanted.tolist()
    assert set(everything.epoch.tolist()) == {0, 1, 2}
    shown = LockRows(lock).view(5)
    assert sum(len(piece.ids) for piece in shown.pieces) == lock.sequence_length
    first = reader.read(np.array([5])).tokens[0, : lock.sequence_length]
    assert [int(i) for piece in shown.pieces for i in piece.ids] == first.tolist()
    assert summarise(lock).order == "olmo-core"


@given(st.integers(0, 2**63), st.integers(0, 9), st.integers(1, 60), st.integers(1, 5))
def test_an_epoch_is_a_permutation_of_whole_chunks_with_an_exact_inverse(
    seed: int, epoch: int, chunks: int, size: int
) -> None:
    rows = chunks * size
    order = shuffled(seed, epoch, rows, size)
    assert sorted(order.tolist()) == list(range(rows))
    assert (order.reshape(-1, size) - order.reshape(-1, size)[:, :1] == np.arange(size)).all()
    assert np.array_equal(shuffled_positions(seed, epoch, rows, size)[order], np.arange(rows))


def test_the_shuffle_is_frozen() -> None:
    assert (
        shuffled(20260101, 0, 12, 1).tolist()
        == np.random.Generator(np.random.PCG64(20260102))
        .permutation(np.arange(12, dtype=np.uint32))
        .tolist()
    )
    assert shuffled(0, 0, 10, 1).tolist() == [8, 4, 7, 0, 1, 2, 5, 9, 6, 3]
    with pytest.raises(ValueError, match="read-only"):
        shuffled(0, 0, 10, 1)[0] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_rows": None}, "batch_rows is missing"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"packing": "best_fit"}, "packing: best_fit"),
        ({"order": "windowed"}, "batch_rows has no meaning"),
        ({"window_chunks": 3}, "window_chunks has no meaning"),
        ({"sources": {"a": {"data": "a"}, "b": {"data": "b"}}}, "2 sources"),
        ({"sources": {"a": {"data": "a", "where": "position > 3"}}}, "a view"),
    ],
)
def test_what_does_not_go_with_it_is_refused_with_its_line(
    change: dict[str, Any], message: str
) -> None:
    manifest = {
        "version": 1,
        "seed": 1,
        "sequence_length": 8,
        "order": "olmo-core",
        "batch_rows": 4,
        "sources": {"a": {"data": "a"}},
        "stages": [{"name": "x", "tokens": 800, "weights": {"a": 1}}],
    } | change
    text = yaml.safe_dump({k: v for k, v in manifest.items() if v is not None}, sort_keys=False)
    with pytest.raises(UsageError, match=message) as caught:
        parse_mixture(text)
    assert "manifest.yaml:" in str(caught.value.where)


def test_a_batch_larger_than_the_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not 1 batch of 5,000"):
        mixed(tmp_path / "m", CASES[0] | {"batch_rows": 5000})
    with pytest.raises(ValueError, match="order olmo-core does not fit"):
        Schedule(0, [("a", 10)], [ScheduleStage(10, (1,))], OlmoCore(batch_rows=2, chunk_rows=4))


def test_a_lock_with_an_impossible_order_is_refused(tmp_path: Path) -> None:
    path = mixed(tmp_path / "m", CASES[0])
    lock = Lock.read(path)
    for other in (
        OlmoCore(batch_rows=0, chunk_rows=1),
        OlmoCore(batch_rows=4, chunk_rows=0),
        Shuffled(),
    ):
        forged = msgspec.structs.replace(lock, order=other)
        forged = msgspec.structs.replace(forged, digest=forged.compute_digest())
        path.write_bytes(forged.encode())
        with pytest.raises(ValidationError):
            Lock.read(path)
