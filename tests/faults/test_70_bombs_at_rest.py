"""FAULTS row 70: bombs in a dataset at rest: refused by every reading verb, in little memory.

Each docs.parquet here has a few kilobytes and, decoded as it asks to be, hundreds of megabytes or
more. The digests are made good, as a stranger would make them. S4 of the audit.
"""

from __future__ import annotations

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
from support.command import program
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.docs import ROW_GROUP, DocsFile, DocumentRows, dense, docs_schema
from olm_data.dataset.manifest import Manifest
from olm_data.errors import ValidationError
from olm_data.storage.store import Store

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


def many_rows(path: Path) -> None:
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


BOMBS: dict[str, Callable[[Path], None]] = {
    "long": long_value,
    "rows": many_rows,
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


@pytest.mark.parametrize("name", BOMBS)
def test_70_show_stats_and_verify_refuse_a_bomb_in_50_mb(
    name: str, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "web"
    shutil.copytree(made, folder)
    forge(folder, BOMBS[name])
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


def test_s4_a_string_of_many_rows_is_held_once_and_copied_out_in_parts(tmp_path: Path) -> None:
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


def test_s4_honest_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
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
def test_s4_rows_that_are_not_such_as_are_written_are_refused(
    forged: Callable[[pa.Table], pa.Table], tmp_path: Path
) -> None:
    table = pa.table(columns(DOCUMENTS)).cast(docs_schema())
    pq.write_table(forged(table), tmp_path / "s.docs.parquet")
    with pytest.raises(ValidationError, match="rows are damaged"):
        DocumentRows(Store(tmp_path), "s", DOCUMENTS).row(0)
