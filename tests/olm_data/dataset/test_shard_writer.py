"""A shard is written whole or not at all, and its bytes depend on its documents only."""

from __future__ import annotations

import hashlib
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import digests, make_dataset, texts, tokenized, write_jsonl

from olm_data.dataset import shard_writer as shard_shuffle
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.docs import ROW_GROUP, docs_schema
from olm_data.dataset.record import BLOCK_BYTES, RECORD, ShardRecord
from olm_data.dataset.shard_writer import (
    ShardWriter,
    TokensSummary,
    document_order,
    publish_shard,
    shuffle_rows,
    shuffle_tokens,
)
from olm_data.errors import ConflictError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.order.prp import permute, round_keys
from olm_data.rows.views import view_document
from olm_data.runners.local import LocalRunner
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer

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


@pytest.mark.parametrize("record", [None, b"{"])
def test_a_late_writer_of_the_same_plan_makes_a_damaged_record_good_and_changes_nothing_else(
    tmp_path: Path, record: bytes | None
) -> None:
    write(tmp_path, [[1, 2], [3]])
    before = files(tmp_path)
    if record is not None:
        (tmp_path / (NAME + RECORD)).write_bytes(record)
    write(tmp_path, [[1, 2], [3]])
    assert files(tmp_path) == before
    with pytest.raises(ConflictError, match="of another plan"):
        write(tmp_path, [[4]], plan="q")
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


# `--shuffle-documents`: the same documents in a keyed order, with their rows and ends.
FIXTURE = [HealthCheck.function_scoped_fixture]


def test_the_order_is_the_documented_permutation() -> None:
    order = document_order(7, "shard-00003", 100)
    assert sorted(order.tolist()) == list(range(100))
    keys = round_keys(7, "documents:shard-00003", 0)
    assert order.tolist() == permute(np.arange(100), 100, keys).tolist()
    assert order[:8].tolist() == GOLDEN


GOLDEN = [71, 92, 8, 20, 91, 60, 62, 21]


@settings(suppress_health_check=FIXTURE, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    data=st.data(),
    piece=st.integers(1, 12),
)
def test_tokens_move_with_their_documents_whatever_the_piece(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    data: st.DataObject,
    piece: int,
) -> None:
    monkeypatch.setattr(shard_shuffle, "PIECE", piece)
    order = np.array(data.draw(st.permutations(range(len(lengths)))), np.int64)
    ends = np.cumsum(lengths).astype(np.uint64)
    tokens = np.arange(int(ends[-1]), dtype=np.uint16)
    path = tmp_path / "tokens"
    path.write_bytes(b"head" + tokens.tobytes())
    new_ends = shuffle_tokens(path, 4, np.dtype(np.uint16), ends, order)
    documents = np.split(tokens, ends[:-1].astype(int))
    moved = [documents[k] for k in order]
    assert path.read_bytes() == b"head" + np.concatenate(moved).tobytes()
    assert new_ends.dtype == np.uint64
    assert new_ends.tolist() == np.cumsum([len(one) for one in moved]).tolist()


def test_rows_move_with_their_documents_in_groups_of_a_size(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.string()), pa.field("n", pa.int64(), nullable=False)])
    count = ROW_GROUP + 4
    table = pa.table({"id": [None if k == 3 else f"d{k}" for k in range(count)], "n": range(count)})
    path = tmp_path / "docs.parquet"
    pq.write_table(table.cast(schema), path, row_group_size=1000)
    order = np.random.default_rng(1).permutation(count)
    shuffle_rows(path, order)
    file = pq.ParquetFile(path)
    assert file.schema_arrow == schema
    assert [file.metadata.row_group(g).num_rows for g in range(2)] == [ROW_GROUP, 4]
    assert file.read()["n"].to_pylist() == order.tolist()
    assert file.read()["id"].to_pylist() == [None if k == 3 else f"d{k}" for k in order]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(60))


def made(source: Path, tokenizer: Path, out: Path, **options: Any) -> Dataset:
    make_dataset([source], tokenizer, out, shard_tokens=250, holdout="1/8", **options)
    return Dataset.open(str(out))


def test_a_shuffled_dataset_holds_the_same_documents_and_verifies(
    source: Path, project: Project
) -> None:
    spec = load_tokenizer(project.tokenizer)
    plain = made(source, project.tokenizer, project / "plain")
    mixed = made(source, project.tokenizer, project / "mixed", shuffle_documents=True, seed=4)
    assert tokenized(mixed).shuffle_documents is True
    assert tokenized(mixed).seed == 4
    assert len(mixed.manifest.shards) > 3
    for split in ("", "validation"):
        assert verify(str(project / "mixed" / split)).ok
    assert mixed.manifest.inputs == plain.manifest.inputs
    begin = 0
    for shard in plain.manifest.shards:
        rows = pq.read_table(project / "plain" / f"{shard.name}.docs.parquet")
        order = document_order(4, shard.name, shard.documents)
        assert order.tolist() != list(range(shard.documents))
        assert pq.read_table(project / "mixed" / f"{shard.name}.docs.parquet") == rows.take(order)
        for place, k in enumerate(order.tolist(), begin):
            document, same = mixed.document(place), plain.document(begin + k)
            assert (document.id, document.position) == (same.id, same.position)
            text = texts(80)[int(str(document.id).split("-")[1])]
            assert document.tokens.tolist() == [*spec.encode(text), spec.eos]
            assert text.startswith(view_document(mixed, place).text[:5])
        begin += shard.documents


def test_a_shuffle_does_not_depend_on_workers_or_interruptions(
    source: Path, project: Project
) -> None:
    def run(name: str, runner: Any, seed: int = 0) -> dict[str, Any]:
        options = {"shuffle_documents": True, "seed": seed, "runner": runner}
        made(source, project.tokenizer, project / name, **options)
        return digests(project / name)

    whole = run("one", InlineRunner())
    assert run("two", LocalRunner(2)) == whole
    for lost in ("manifest.json", "shard-00001.json", "shard-00002.tokens.npy"):
        (project / "one" / lost).unlink()
    assert run("one", InlineRunner()) == whole
    assert run("other", InlineRunner(), seed=1) != whole
