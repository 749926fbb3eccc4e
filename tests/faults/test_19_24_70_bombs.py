"""FAULTS rows 19, 24, 70: long documents in memory like their size; bombs refused in little."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.command import olm_data, program
from support.reading import read_source
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.docs import ROW_GROUP, DocsFile, DocumentRows, dense, docs_schema
from olm_data.dataset.manifest import Manifest
from olm_data.errors import InputError, ValidationError
from olm_data.sources import limits
from olm_data.storage.store import Store

THIRTY = 30_000_000


WORDS = "It was a bright cold day in April, and the clocks were striking 13.\n\u00e9 "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("long")
    text = WORDS * (THIRTY // len(WORDS.encode()))
    line = json.dumps({"text": text}, ensure_ascii=False).encode() + b'\n{"text": "after"}\n'
    (place / "a.jsonl").write_bytes(line)
    (place / "b.jsonl.gz").write_bytes(gzip.compress(line, 1))
    (place / "c.txt").write_text(text)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.txt"])
def test_19_a_document_of_thirty_megabytes_is_read_and_encoded_in_bounded_memory(
    folder: Path, tiny_tokenizer: Path, name: str
) -> None:
    script = f"""
from support.memory import peak
from olm_data.encoders import make_encoder
from olm_data.sources import plan_units, read_units
from support.reading import resolve_source
from olm_data.tokenizer.tokenizer import load_tokenizer
encoder = make_encoder("gigatoken", load_tokenizer({str(tiny_tokenizer)!r}), "plain")
before = peak()
plan = resolve_source([{str(folder / name)!r}])
units = [u for i, f in enumerate(plan.inputs) for u in plan_units(i, f, plan.options, 1 << 20)]
size = tokens = 0
for batch in read_units(plan.inputs, units, plan.options):
    size += len(batch.data)
    tokens += len(encoder.encode(batch.data, batch.offsets).ids)
print(size, tokens, (peak() - before) * 1024)
"""
    done = program("-c", script)
    assert done.returncode == 0, done.stderr
    size, tokens, grown = map(int, done.stdout.split())
    assert size >= THIRTY - len(WORDS.encode())
    assert tokens > size // 8
    # The line, its text, its bytes, their copy in a batch, and four bytes a token twice.
    assert grown < 6 * size + 8 * tokens + (64 << 20)


SIXTY = 60_000_000


FIXED = 700 << 20  # the libraries' pools and threads; measured with an empty document: 500 MiB


PER_BYTE = 10  # line, its text, UTF-8, the batch, ids at 4 bytes each in two forms


SCRIPT = """
import resource, sys
from pathlib import Path
from support.tokenizing import make_dataset, write_jsonl, texts

source, tokenizer, folder = map(Path, sys.argv[1:4])
room = int(sys.argv[4])
small = write_jsonl(folder / "small.jsonl", texts(5))
make_dataset([small], tokenizer, folder / "small", encoder="gigatoken")  # all libraries are loaded
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
made = make_dataset([source], tokenizer, folder / "out", encoder="gigatoken")
print(made.manifest.totals.documents, made.manifest.totals.text_bytes, made.manifest.totals.tokens)
"""


@pytest.mark.slow
def test_19_a_line_of_sixty_megabytes_is_one_document_under_a_memory_limit(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    text = WORDS * (SIXTY // len(WORDS.encode()))
    size = len(text.encode())
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False))
    room = FIXED + PER_BYTE * size
    words = (tmp_path / "a.jsonl", tiny_tokenizer, tmp_path, str(room))
    done = program("-c", SCRIPT, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    documents, text_bytes, tokens = map(int, done.stdout.split())
    assert (documents, text_bytes) == (1, size)
    assert tokens > size // 8


PIECE = 16 << 20


PIECES = 256  # 4 GiB of text each


LINE = b'{"text": "' + b"a" * 2000 + b'"}\n'


LINES = LINE * (PIECE // len(LINE))


def gz(piece: bytes) -> bytes:
    return gzip.compress(piece, 9, mtime=0) * PIECES


def zst(piece: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(piece) * PIECES


def one_value(path: Path) -> None:
    column = pa.array([b"a" * (100 << 20)], pa.binary())
    pq.write_table(pa.table({"text": column}), path, compression="zstd", use_dictionary=False)


def dictionary() -> pa.DictionaryArray:
    """20,000 rows of one value of 200 kB that does not compress: 4 GB from 200 kB."""
    value = np.random.default_rng(0).integers(97, 123, 200_000, np.uint8).tobytes()
    indices = pa.array(np.zeros(20_000, np.int32))
    return pa.DictionaryArray.from_arrays(indices, pa.array([value], pa.binary()))


def many_rows(path: Path) -> None:
    pq.write_table(pa.table({"text": dictionary()}), path, dictionary_pagesize_limit=1 << 20)


def other_column(path: Path, *, use_dictionary: bool) -> None:
    """Ids of 900 kB beside short texts: 900 MB from 50 kB."""
    table = pa.table({"text": ["short"] * 1000, "id": ["a" * 900_000] * 1000})
    options = {"use_dictionary": use_dictionary, "dictionary_pagesize_limit": 1 << 21}
    pq.write_table(table, path, compression="zstd", **options)


def arrow_rows(path: Path) -> None:
    table = pa.table({"text": dictionary()})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


BOMBS: dict[str, Callable[[Path], object]] = {
    "line.jsonl.gz": lambda path: path.write_bytes(gz(b"a" * PIECE)),
    "lines.jsonl.gz": lambda path: path.write_bytes(gz(LINES)),
    "line.jsonl.zst": lambda path: path.write_bytes(zst(b"a" * PIECE)),
    "lines.jsonl.zst": lambda path: path.write_bytes(zst(LINES)),
    "text.txt.zst": lambda path: path.write_bytes(zst(b"a\n" * (PIECE // 2))),
    "value.parquet": one_value,
    "rows.parquet": many_rows,
    "ids.parquet": lambda path: other_column(path, use_dictionary=False),
    "named.parquet": lambda path: other_column(path, use_dictionary=True),
    "rows.arrow": arrow_rows,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_24_a_bomb_is_refused_by_name_in_bounded_memory(name: str, tmp_path: Path) -> None:
    BOMBS[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size < 10 << 20
    script = f"""
from support.memory import peak
from olm_data.errors import InputError
from olm_data.sources import plan_units, read_units
from support.reading import resolve_source
import pyarrow.parquet, pyarrow.compute
before = peak()
text = 0
try:
    plan = resolve_source([{str(tmp_path / name)!r}])
    units = [u for i, f in enumerate(plan.inputs) for u in plan_units(i, f, plan.options, 1 << 20)]
    for batch in read_units(plan.inputs, units, plan.options):
        text += len(batch.data)
except InputError as error:
    print(text, (peak() - before) * 1024, error.exit_code, error)
"""
    done = program("-c", script)
    assert done.returncode == 0, done.stderr
    text, grown, code, said = done.stdout.split(" ", 3)
    assert code == "4"
    assert name in said
    assert "bomb" in said
    assert int(text) <= 1 << 30
    assert int(grown) < 3 * limits.MAX_BATCH_BYTES


def test_24_the_command_exits_4(tiny_tokenizer: Path, tmp_path: Path) -> None:
    BOMBS["line.jsonl.zst"](tmp_path / "a.jsonl.zst")
    done = olm_data(
        *("tokenize", "a.jsonl.zst", "--tokenizer", tiny_tokenizer, "--output", "out"),
        *("--workers", "1"),
        folder=tmp_path,
    )
    assert done.returncode == 4
    assert "a.jsonl.zst" in done.stderr
    assert "bomb" in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_24_nested_compression_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz.gz").write_bytes(gzip.compress(gzip.compress(b"{}")))
    with pytest.raises(InputError, match="format"):
        read_source(str(tmp_path / "a.jsonl.gz.gz"))


@pytest.mark.parametrize("name", ["a.jsonl", "b.txt", "c.jsonl.gz"])
def test_24_a_line_or_document_above_the_limit_is_refused_with_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_RECORD_BYTES", 5_000_000)
    text = b'{"text": "first"}\n{"text": "' + b"a b " * 3_000_000 + b'"}'
    (tmp_path / name).write_bytes(gzip.compress(text, 1) if name.endswith("gz") else text)
    with pytest.raises(InputError, match="longer than 5,000,000 bytes") as caught:
        read_source(str(tmp_path / name))
    assert name in str(caught.value.where)


def test_24_honest_text_that_compresses_well_is_read(tmp_path: Path) -> None:
    line = b'{"text": "%07d ' + b"GET /index.html HTTP/1.1 200 " * 20 + b'"}'
    text = b"\n".join(line % k for k in range(120_000))
    packed = gzip.compress(text, 6)
    assert len(text) > limits.FREE_BYTES
    assert len(text) > 50 * len(packed)
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    assert len(read_source(str(tmp_path / "a.jsonl.gz")).texts) == 120_000


DOCUMENTS = 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("bombs")
    source = write_jsonl(folder / "a.jsonl", texts(DOCUMENTS))
    make_dataset([source], tiny_tokenizer, folder / "web")
    return folder / "web"


def columns(rows: int) -> dict[str, pa.Array]:
    return {
        "id": pa.array(["a"] * rows, pa.string()),
        "input": pa.array(np.zeros(rows, np.int32)),
        "position": pa.array(np.arange(rows)),
        "text_bytes": pa.array(np.ones(rows, np.int64)),
        "content_hash": pa.array(np.arange(rows, dtype=np.uint64)),
    }


def long_value(path: Path) -> None:
    """One id of 150 MB that zstd makes a few kilobytes of."""
    made = columns(DOCUMENTS) | {"id": pa.array(["a" * (150 << 20)] + ["a"] * (DOCUMENTS - 1))}
    table = pa.table(made, docs_schema())
    pq.write_table(table, path, compression="zstd", use_dictionary=False)


def many_documents(path: Path) -> None:
    """Five million rows where the manifest says twenty, in 200 kB."""
    rows = 5_000_000
    zeros = {"id": pa.nulls(rows, pa.string())} | {
        field.name: pa.array(np.zeros(rows, field.type.to_pandas_dtype()))
        for field in list(docs_schema())[1:]
    }
    pq.write_table(pa.table(zeros, docs_schema()), path, row_group_size=rows)


def kept_list(path: Path) -> None:
    """A kept column that is a list of a million zeros for each row."""
    zeros = pa.array(np.zeros(1_000_000, np.int64))
    lists = pa.ListArray.from_arrays(pa.array([0, *[1_000_000] * DOCUMENTS], pa.int32()), zeros)
    pq.write_table(pa.table(columns(DOCUMENTS) | {"kept": lists}), path)


AT_REST: dict[str, Callable[[Path], None]] = {
    "long": long_value,
    "rows": many_documents,
    "list": kept_list,
}


def forge(folder: Path, bomb: Callable[[Path], None]) -> None:
    """Put a bomb into a dataset, with digests that are right."""
    path = folder / "shard-00000.docs.parquet"
    bomb(path)
    assert path.stat().st_size < 1 << 20
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    record = json.loads((folder / "shard-00000.json").read_bytes())
    record["files"]["docs"] = {"bytes": path.stat().st_size, "sha256": sha256}
    (folder / "shard-00000.json").write_text(json.dumps(record))
    digest = hashlib.sha256((folder / "shard-00000.json").read_bytes()).hexdigest()
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    known = manifest.shards[0]
    digests = msgspec.structs.replace(known.sha256, docs=sha256, record=digest)
    manifest.shards[0] = msgspec.structs.replace(known, sha256=digests)
    manifest = msgspec.structs.replace(manifest, digest=manifest.compute_digest())
    (folder / "manifest.json").write_bytes(manifest.encode())


@pytest.mark.parametrize("name", AT_REST)
def test_70_show_stats_and_verify_refuse_a_bomb_in_50_mb(
    name: str, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "web"
    shutil.copytree(made, folder)
    forge(folder, AT_REST[name])
    script = """
import contextlib, io, sys
import olm_data.extensions.show.documents, olm_data.extensions.stats.count
import olm_data.extensions.verify.datasets, pyarrow.compute
from olm_data.cli import main
from support.memory import peak
good, bad = sys.argv[1:]
def codes(folder):
    found = []
    for words in (("show", "document", folder, "0"), ("stats", folder), ("verify", folder)):
        sys.argv = ["olm-data", *words]
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                main()
                found.append(0)
            except SystemExit as end:
                found.append(end.code or 0)
    return found
assert codes(good) == [0, 0, 0], codes(good)
before = peak()
print(*codes(bad), (peak() - before) // 1024)
"""
    done = program("-c", script, made, folder)
    assert done.returncode == 0, done.stderr
    show, stats, verify, grown = map(int, done.stdout.split())
    assert (show, verify) == (3, 3)
    assert stats == (0 if name == "long" else 3)  # it does not read the ids
    assert grown < 50


def test_70_s4_a_string_of_many_rows_is_held_once_and_copied_out_in_parts(tmp_path: Path) -> None:
    value = np.random.default_rng(0).integers(97, 123, 400_000, np.uint8).tobytes().decode()
    rows = 1000
    table = pa.table(columns(rows) | {"kept": pa.array([value] * rows)})
    pq.write_table(
        table.cast(docs_schema(pa.schema([table.schema.field("kept")]))),
        tmp_path / "d.parquet",
        dictionary_pagesize_limit=1 << 20,
    )
    with open(tmp_path / "d.parquet", "rb") as raw:
        group = DocsFile(raw, rows).group(0, ["position", "kept"])
        assert group.nbytes < 1 << 20
        parts = [(part.num_rows, part.nbytes) for part in dense(group)]
    assert sum(count for count, _ in parts) == rows
    assert max(size for _, size in parts) < 20 << 20


def test_70_s4_honest_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = ROW_GROUP + 10
    rng = np.random.default_rng(1)
    kept = [None if n % 7 == 0 else f"{n % 5} text \u00e9" for n in range(rows)]
    data = columns(rows) | {"id": pa.array([f"{n:x}" for n in rng.permutation(rows)]), "k": kept}
    table = pa.table(data).cast(docs_schema(pa.schema([pa.field("k", pa.string())])))
    pq.write_table(table, tmp_path / "s.docs.parquet", row_group_size=ROW_GROUP)
    found = DocumentRows(Store(tmp_path), "s", rows)
    assert found.table(table.column_names).equals(table)
    assert found.row(ROW_GROUP + 3).columns["k"] == kept[ROW_GROUP + 3]
    assert sum(batch.num_rows for batch in found.batches(["id"])) == rows


@pytest.mark.parametrize(
    "forged",
    [
        lambda t: t.rename_columns(["input", *t.column_names[1:-1], "id"]),
        lambda t: t.append_column("k\x1b[31m", t["id"]),
        lambda t: t.append_column("id", t["id"]),
        lambda t: t.slice(1),
    ],
)
def test_70_s4_rows_that_are_not_such_as_are_written_are_refused(
    forged: Callable[[pa.Table], pa.Table], tmp_path: Path
) -> None:
    table = pa.table(columns(DOCUMENTS)).cast(docs_schema())
    pq.write_table(forged(table), tmp_path / "s.docs.parquet")
    with pytest.raises(ValidationError, match="rows are damaged"):
        DocumentRows(Store(tmp_path), "s", DOCUMENTS).row(0)
