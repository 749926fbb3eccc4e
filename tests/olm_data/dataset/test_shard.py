"""A shard reads back as it was written; what was changed since is found before it is used."""

from __future__ import annotations

import hashlib
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inline_runner import InlineRunner
from support.project import Project
from support.small_datasets import write_dataset
from support.tokenizing import digests, make_dataset, texts, tokenized, write_jsonl

from olm_data.dataset import shard_writer as shard_shuffle
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.docs import ROW_GROUP, docs_schema
from olm_data.dataset.manifest import Manifest, ShardDigests
from olm_data.dataset.record import BLOCK_BYTES, HEADER_BYTES, RECORD, ShardRecord, npy_header
from olm_data.dataset.shard import Shard
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
LENGTHS = [1, 30_000, 2, 69_997]  # 100,000 tokens of 2 bytes: four blocks
IDS = np.arange(sum(LENGTHS)) % 50_000
BLOCK = BLOCK_BYTES // 2


def make(folder: Path, container: str = "npy") -> Manifest:
    documents = np.split(IDS.astype(np.uint32), np.cumsum(LENGTHS)[:-1])
    return write_dataset(folder, [documents], container=container)  # type: ignore[arg-type]


def opened(
    folder: Path, manifest: Manifest, verify: Any = "lazy", mapped: bool = True, **changes: Any
) -> Shard:
    """Open the shard; `changes` are of what its manifest says of it."""
    info = msgspec.structs.replace(manifest.shards[0], **changes)
    return Shard(Store(folder), manifest, info, verify=verify, mapped=mapped)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Manifest]]:
    """A shard in each container; tests do not change these."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("npy", "raw")}
    return {kind: (folder, make(folder, kind)) for kind, folder in folders.items()}


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, Manifest]:
    return tmp_path, make(tmp_path)


def flip(folder: Path, token: int, file: str = "tokens.npy") -> None:
    """Change a bit of one token."""
    with open(folder / f"{NAME}.{file}", "r+b") as changed:
        changed.seek(HEADER_BYTES + 2 * token)
        byte = changed.read(1)[0]
        changed.seek(-1, 1)
        changed.write(bytes([byte ^ 1]))


def forged(folder: Path, manifest: Manifest, ends: list[int]) -> ShardDigests:
    """Write other ends and return digests by which they are right."""
    data = npy_header(np.dtype(np.uint64), len(ends)) + np.array(ends, np.uint64).tobytes()
    (folder / f"{NAME}.ends.npy").write_bytes(data)
    ends_sha256 = hashlib.sha256(data).hexdigest()
    return msgspec.structs.replace(manifest.shards[0].sha256, ends=ends_sha256)


# --- reading -------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, len(IDS)),
    st.integers(0, len(IDS)),
    st.sampled_from(["npy", "raw"]),
    st.sampled_from(["off", "lazy", "full"]),
    st.booleans(),
)
def test_every_range_of_tokens_reads_back(
    shards: dict[str, tuple[Path, Manifest]],
    first: int,
    second: int,
    container: str,
    verify: str,
    mapped: bool,
) -> None:
    start, stop = sorted((first, second))
    found = opened(*shards[container], verify=verify, mapped=mapped).read(start, stop)
    assert found.dtype == np.uint16
    assert np.array_equal(found, IDS[start:stop])


def test_ends_and_record_are_those_of_the_documents(
    shards: dict[str, tuple[Path, Manifest]],
) -> None:
    for container, (folder, manifest) in shards.items():
        for mapped in (True, False):
            shard = opened(folder, manifest, mapped=mapped)
            assert shard.ends.tolist() == np.cumsum(LENGTHS).tolist(), container
            assert (shard.record.tokens, shard.record.documents) == (len(IDS), len(LENGTHS))


def test_a_token_file_may_have_a_name_of_its_own(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    (folder / f"{NAME}.tokens.npy").rename(folder / "theirs.npy")
    assert opened(folder, manifest, file="theirs.npy").read(5, 8).tolist() == [5, 6, 7]


# --- damage to the tokens ------------------------------------------------------------------------
@pytest.mark.parametrize("mapped", [True, False])
def test_lazily_a_changed_block_is_found_when_it_is_touched(
    shard: tuple[Path, Manifest], mapped: bool
) -> None:
    folder, manifest = shard
    flip(folder, 2 * BLOCK + 5)
    found = opened(folder, manifest, mapped=mapped)
    assert found.read(0, BLOCK).tolist() == IDS[:BLOCK].tolist()
    for _ in range(2):  # it stays unchecked
        with pytest.raises(ValidationError, match=r"bytes 131,072 to 196,608 have changed"):
            found.read(2 * BLOCK, 2 * BLOCK + 1)
    assert found.read(3 * BLOCK, len(IDS)).tolist() == IDS[3 * BLOCK :].tolist()


def test_full_finds_it_at_once_and_off_never(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    flip(folder, 99_999)
    with pytest.raises(ValidationError, match="have changed"):
        opened(folder, manifest, verify="full")
    assert opened(folder, manifest, verify="off").read(99_999, 100_000) != IDS[-1]


def test_a_block_is_checked_once(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    found = opened(folder, manifest)
    starts = np.array([0, BLOCK - 60, BLOCK, 3 * BLOCK])
    assert found.is_checked(starts, 100).tolist() == [False] * 4
    found.check(0, 10)
    assert found.is_checked(starts, 100).tolist() == [True, False, False, False]
    found.check(0, len(IDS))
    assert found.is_checked(starts, 100).all()
    flip(folder, 3)
    found.check(0, 10)
    assert opened(folder, manifest, verify="off").is_checked(starts, 100).all()
    assert not opened(folder, manifest, mapped=False).is_checked(starts, 100).any()


# --- damage that shows at open -------------------------------------------------------------------
@pytest.mark.parametrize("file", ["tokens.npy", "ends.npy"])
@pytest.mark.parametrize("verify", ["off", "lazy", "full"])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_of_another_size_is_refused_at_open(
    shard: tuple[Path, Manifest], file: str, verify: str, mapped: bool
) -> None:
    folder, manifest = shard
    path = folder / f"{NAME}.{file}"
    whole = path.read_bytes()
    for data in (whole[:-1], whole + b"\0", whole[:10], b""):
        path.write_bytes(data)
        with pytest.raises(ValidationError, match=rf"has {len(data):,} bytes, not {len(whole):,}"):
            opened(folder, manifest, verify=verify, mapped=mapped)
    path.unlink()
    with pytest.raises(ValidationError, match="the file is missing"):
        opened(folder, manifest, verify=verify, mapped=mapped)


@pytest.mark.parametrize("mapped", [True, False])
def test_ends_are_checked_by_digest_and_by_sense(
    shard: tuple[Path, Manifest], mapped: bool
) -> None:
    folder, manifest = shard
    total = len(IDS)
    forged(folder, manifest, [1, 2, 3, total])
    with pytest.raises(ValidationError, match="do not match their digest"):
        opened(folder, manifest, mapped=mapped)
    for ends, message in (
        ([0, 2, 3, total], "do not rise"),
        ([1, 3, 3, total], "do not rise"),
        ([1, 3, 2, total], "do not rise"),
        ([1, 2, 3, total - 1], "does not end at token 100,000"),
        ([1, 2, 3, 2**63], "does not end at token 100,000"),
    ):
        digests = forged(folder, manifest, ends)
        for how in ("off", "lazy"):
            with pytest.raises(ValidationError, match=message):
                opened(folder, manifest, mapped=mapped, verify=how, sha256=digests)


def test_another_commit_record_is_refused_on_first_use(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    digests = msgspec.structs.replace(manifest.shards[0].sha256, record="0" * 64)
    found = opened(folder, manifest, sha256=digests)
    with pytest.raises(ValidationError, match="digest"):
        found.read(0, 1)


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
