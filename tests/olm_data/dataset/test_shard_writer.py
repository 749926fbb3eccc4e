"""A shard is written whole or not at all, and its bytes depend on its documents only."""

from __future__ import annotations

import hashlib
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olm_data.dataset.docs import docs_schema
from olm_data.dataset.record import BLOCK_BYTES, RECORD, ShardRecord
from olm_data.dataset.shard_writer import ShardWriter, TokensSummary, publish_shard
from olm_data.errors import ConflictError, ValidationError
from olm_data.storage.store import Store

NAME = "shard-00000"
Documents = list[list[int]]


def rows(first: int, count: int) -> pa.RecordBatch:
    numbers = np.arange(first, first + count)
    return pa.record_batch(
        {
            "id": pa.array([f"d{n}" for n in numbers]),
            "input": pa.array(np.zeros(count, np.int32)),
            "position": pa.array(numbers),
            "text_bytes": pa.array(np.full(count, 5)),
            "content_hash": pa.array(numbers.astype(np.uint64)),
        },
        schema=docs_schema(),
    )


def append(writer: ShardWriter, documents: Documents, first: int = 0) -> None:
    ids = np.array([token for document in documents for token in document], np.uint32)
    offsets = np.array([0, *accumulate(map(len, documents))], np.int64)
    writer.append(ids, offsets, rows(first, len(documents)))


def write(
    folder: Path, documents: Documents, cuts: list[int] | None = None, **options: Any
) -> ShardRecord:
    """Write a shard by one `append`, or by one more at each cut."""
    plan = options.pop("plan", "p")
    store = Store(folder)
    with store.staging() as staging:
        writer = ShardWriter(
            store, NAME, dtype=np.dtype("uint16"), vocab_size=1000, staging=staging, **options
        )
        for start, stop in zip([0, *(cuts or [])], [*(cuts or []), len(documents)], strict=True):
            append(writer, documents[start:stop], start)
        return writer.commit(plan=plan, units=[{"input": 0}], dropped={"empty": 2, "a": 1})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


DOCUMENTS = st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=9), min_size=1, max_size=9)


@settings(max_examples=25, deadline=None)
@given(DOCUMENTS, st.data(), st.sampled_from(["npy", "raw"]), st.none() | st.integers(0, 3))
def test_the_bytes_do_not_depend_on_how_documents_were_handed_over(
    tmp_path_factory: pytest.TempPathFactory,
    documents: Documents,
    data: st.DataObject,
    container: str,
    shuffle: int | None,
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(documents)), max_size=3)))
    whole, parts = (tmp_path_factory.mktemp(name) for name in ("whole", "parts"))
    for folder, where in ((whole, []), (parts, cuts)):
        write(folder, documents, where, container=container, shuffle=shuffle)
    assert files(whole) == files(parts)
    assert len(files(whole)) == 4


@pytest.mark.parametrize("container", ["npy", "raw"])
def test_the_record_tells_sizes_digests_and_checksums_of_what_is_there(
    tmp_path: Path, container: str
) -> None:
    documents = [[7] * 40_000, [1, 2, 999]]
    record = write(tmp_path, documents, container=container)
    there = files(tmp_path)
    assert ShardRecord.parse(there[NAME + RECORD]) == record
    tokens = next(name for name in there if ".tokens." in name)
    names = {"tokens": tokens, "ends": f"{NAME}.ends.npy", "docs": f"{NAME}.docs.parquet"}
    for kind, name in names.items():
        data = there[name]
        assert record.files[kind].bytes == len(data)
        assert record.files[kind].sha256 == hashlib.sha256(data).hexdigest()
    data = there[tokens]
    blocks = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
    assert len(blocks) == 2
    assert [record.blocks.crc(k) for k in range(2)] == [zlib.crc32(block) for block in blocks]
    assert (record.tokens, record.documents, record.text_bytes) == (40_003, 2, 10)
    assert (record.max_token_id, record.dropped) == (999, {"a": 1, "empty": 2})
    assert np.load(tmp_path / f"{NAME}.ends.npy").tolist() == [40_000, 40_003]


def test_the_record_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    create = Store.create

    def watched(store: Store, name: str, data: bytes, **more: Any) -> Any:
        seen.append(sorted(files(tmp_path)))
        return create(store, name, data, **more)

    monkeypatch.setattr(Store, "create", watched)
    write(tmp_path, [[1]])
    assert seen == [[f"{NAME}.docs.parquet", f"{NAME}.ends.npy", f"{NAME}.tokens.npy"]]


def test_an_empty_shard_is_a_record_alone(tmp_path: Path) -> None:
    record = write(tmp_path, [])
    assert list(files(tmp_path)) == [NAME + RECORD]
    assert (record.tokens, record.documents, record.files) == (0, 0, {})


def test_nothing_is_seen_of_a_shard_that_was_not_committed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.staging() as staging:
        writer = ShardWriter(store, NAME, dtype=np.dtype("uint16"), vocab_size=9, staging=staging)
        append(writer, [[1, 2]])
        assert writer.tokens == 2
        writer.discard()
    assert files(tmp_path) == {}


def test_ids_outside_the_vocabulary_and_empty_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="outside the vocabulary of 1000"):
        write(tmp_path, [[1], [1000]])
    with pytest.raises(ValidationError, match="empty document"):
        write(tmp_path, [[1], []])
    assert files(tmp_path) == {}


def test_a_late_writer_of_the_same_plan_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2], [3]])
    before = files(tmp_path)
    write(tmp_path, [[1, 2], [3]])
    assert files(tmp_path) == before


def test_a_shard_of_another_plan_is_not_written_over(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2], [3]])
    before = files(tmp_path)
    with pytest.raises(ConflictError, match="of another plan"):
        write(tmp_path, [[4]], plan="q")
    assert files(tmp_path) == before


def test_a_damaged_record_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2], [3]])
    before = files(tmp_path)
    (tmp_path / (NAME + RECORD)).write_bytes(b"{")
    write(tmp_path, [[1, 2], [3]])
    assert files(tmp_path) == before


def test_a_token_file_that_is_in_its_place_gets_the_same_sidecars(tmp_path: Path) -> None:
    written = write(tmp_path / "written", [[1, 2], [3]])
    beside = tmp_path / "beside"
    store = Store(beside)
    with store.staging() as staging:
        paths = {kind: staging / (NAME + kind) for kind in (".ends.npy", ".docs.parquet")}
        paths[".docs.parquet"].write_bytes(files(tmp_path / "written")[f"{NAME}.docs.parquet"])
        summary = TokensSummary(file=written.files["tokens"], crc32=written.blocks.crc32, largest=3)
        publish_shard(
            store, NAME, paths, np.array([2, 3], np.uint64), summary,
            plan="p", text_bytes=10, units=[{"input": 0}], dropped={"a": 1, "empty": 2},
        )  # fmt: skip
    there = files(tmp_path / "written")
    del there[f"{NAME}.tokens.npy"]
    assert files(beside) == there
