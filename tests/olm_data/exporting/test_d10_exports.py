"""AUDIT row D10: exports to s3://, Megatron as one prefix, kept columns in samples, LitData."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import exported
from support.command import inside
from support.datasets import random_shards, write_dataset

from olm_data.errors import ConflictError, InputError, StorageError, ValidationError
from olm_data.exporting import megatron, samples
from olm_data.exporting.destination import CLAIM, RECORD
from olm_data.exporting.export import FORMATS, MERGED, export
from olm_data.importing.megatron import read_index
from olm_data.storage.store import Store

COLUMNS = {
    "score": (pa.array([0.5, float("inf"), -2.0]), "float64", "float"),
    "year": (pa.array([2020, -(2**63), 2**63 - 1]), "int", "int"),
    "good": (pa.array([True, False, True]), "json", "bool"),
    "lang": (pa.array(["", "\u00fc\n\u4f60", "x" * 300]), "str", "str"),
    "hole": (pa.array([1, None, 3]), "json", "str"),
    "name": (pa.array(["a", "null", None]), "json", "str"),
}
ROWS: list[dict[str, Any]] = [
    {name: values[0][k].as_py() for name, values in COLUMNS.items()} for k in range(3)
]


@pytest.fixture
def with_columns(tmp_path: Path) -> str:
    """Two shards: `hole` has its null in the first, `name` in the second."""
    columns = {name: values[0] for name, values in COLUMNS.items()}
    write_dataset(tmp_path / "d", [[[1, 2], [3]], [[4]]], columns=columns)
    return str(tmp_path / "d")


def test_d10_mds_holds_kept_columns_with_their_types(with_columns: str, tmp_path: Path) -> None:
    done = export(with_columns, "mds", str(tmp_path / "out"))
    rows = exported.mds_rows(tmp_path / "out", "uint16")
    assert [{k: v for k, v in row.items() if k not in ("id", "tokens")} for row in rows] == ROWS
    assert [row["tokens"] for row in rows] == [[1, 2], [3], [4]]
    shard = json.loads((tmp_path / "out" / "index.json").read_text())["shards"][0]
    assert shard["column_encodings"][2:] == [mds for _, mds, _ in COLUMNS.values()]
    assert not any("kept columns" in sentence for sentence in done.lost)


def test_d10_litdata_holds_kept_columns_with_their_types(with_columns: str, tmp_path: Path) -> None:
    done = export(with_columns, "litdata", str(tmp_path / "out"))
    rows = exported.litdata_rows(tmp_path / "out", "uint16")
    for row, wanted in zip(rows, ROWS, strict=True):
        as_text = {name: json.loads(row[name]) for name in ("hole", "name")}
        assert {k: v for k, v in (row | as_text).items() if k in wanted} == wanted
    config = json.loads((tmp_path / "out" / "index.json").read_text())["config"]
    assert config["data_format"][2:] == [kind for _, _, kind in COLUMNS.values()]
    assert "as JSON text, as they hold nulls: kept columns hole, name" in done.lost


@pytest.mark.parametrize("form", ["mds", "litdata"])
def test_d10_a_kept_column_named_as_the_tokens_is_refused(tmp_path: Path, form: str) -> None:
    write_dataset(tmp_path / "d", [[[1]]], columns={"tokens": pa.array([1])})
    with pytest.raises(InputError, match="called tokens"):
        export(str(tmp_path / "d"), form, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("form", "package"), [("mds", "streaming"), ("litdata", "litdata")])
def test_d10_the_projects_own_reader_finds_the_same_rows(
    with_columns: str, tmp_path: Path, form: str, package: str
) -> None:
    """benchmarks/check_exports.py runs these readers, and all others, in environments it makes."""
    pytest.importorskip(package)
    export(with_columns, form, str(tmp_path / "out"))
    options = "local=sys.argv[1], batch_size=1" if form == "mds" else "sys.argv[1]"
    read = (
        f"import json, sys, {package}; rows = {package}.StreamingDataset({options}); "
        "print('rows', json.dumps([{k: v.tolist() if k == 'tokens' else v for k, v in "
        "rows[i].items()} for i in range(len(rows))]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", read, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("rows "))
    text = ("hole", "name") if form == "litdata" else ()
    rows = [
        {k: json.loads(v) if k in text else v for k, v in row.items()}
        for row in json.loads(line[5:])
    ]
    assert [row.pop("tokens") for row in rows] == [[1, 2], [3], [4]]
    assert [row.pop("id") for row in rows] == ["doc-0", "doc-1", "doc-2"]
    assert rows == ROWS


# --- one Megatron prefix --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_d10_one_megatron_prefix_holds_all_shards(tmp_path: Path, dtype: str) -> None:
    shards = random_shards(1, [[3, 1, 300], [1], [7000, 2]], 50_000)
    write_dataset(tmp_path / "d", shards, dtype=dtype, container="raw")
    done = export(str(tmp_path / "d"), "megatron", str(tmp_path / "out"), merge=True)
    assert sorted(done.files) == ["dataset.bin", "dataset.idx"]
    documents = [document.tolist() for shard in shards for document in shard]
    assert exported.megatron(tmp_path / "out", dtype) == [(None, ids) for ids in documents]
    assert (done.linked, done.documents) == (0, 6)
    size = (tmp_path / "out" / "dataset.bin").stat().st_size
    index = (tmp_path / "out" / "dataset.idx").read_bytes()
    ends = read_index(index, np.dtype(dtype), size)
    assert ends.tolist() == np.cumsum([len(ids) for ids in documents]).tolist()


def test_d10_a_merged_export_is_another_than_one_by_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "d", [[[1, 2]], [[3]]])
    words = ("export", tmp_path / "d", "--to", "megatron", "--merge", "--output", tmp_path / "out")
    said = inside(capsys, *words)
    assert f"--data-path {tmp_path / 'out'}/dataset" in said.stderr
    assert inside(capsys, *words).stdout.startswith("already there")
    with pytest.raises(ConflictError):
        export(str(tmp_path / "d"), "megatron", str(tmp_path / "out"))


def test_d10_a_document_too_long_for_megatron_is_refused_when_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "d", [[[1, 2]], [[1, 2, 3, 3]]])
    monkeypatch.setattr(megatron, "MOST", 3)
    with pytest.raises(InputError, match="4 tokens"):
        export(str(tmp_path / "d"), "megatron", str(tmp_path / "out"), merge=True)
    assert not (tmp_path / "out").exists()


# --- s3:// ----------------------------------------------------------------------------------------


def objects(url: str) -> dict[str, int]:
    return {entry.name: entry.size for entry in Store(url).entries()}


def fetched(url: str, folder: Path) -> Path:
    folder.mkdir()
    for name in objects(url):
        (folder / name).write_bytes(Store(url).read(name))
    return folder


@pytest.fixture
def prefix(s3: dict[str, str], tmp_path: Path) -> str:
    return f"s3://{s3['bucket']}/{tmp_path.name}"


def test_d10_an_export_to_s3_has_the_bytes_of_a_local_one(prefix: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", random_shards(2, [[5, 600], [70]]), container="raw")
    for form, merge in [*((form, False) for form in FORMATS), *((form, True) for form in MERGED)]:
        name = form + "-merged" * merge
        local = export(str(tmp_path / "d"), form, str(tmp_path / name), merge=merge)
        done = export(str(tmp_path / "d"), form, f"{prefix}/{name}", merge=merge)
        there = fetched(f"{prefix}/{name}", tmp_path / f"{name}-fetched")
        wanted = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        receipt = json.loads(wanted.pop(RECORD)) | {"linked": 0}
        found = {p.name: p.read_bytes() for p in there.iterdir()}
        assert json.loads(found.pop(RECORD)) == receipt
        assert found == wanted
        assert (done.status, done.files, done.linked) == ("written", local.files, 0)
    again = export(str(tmp_path / "d"), "mds", f"{prefix}/mds")
    assert again.status == "already there"
    with pytest.raises(ConflictError, match="something else"):
        export(str(tmp_path / "d"), "hf", f"{prefix}/mds")


def test_d10_a_prefix_with_anything_in_it_is_left_alone(prefix: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]])
    Store(prefix).put("mine", b"mine")
    with pytest.raises(ConflictError, match="not empty"):
        export(str(tmp_path / "d"), "mds", prefix)
    assert objects(prefix) == {"mine": 4}


def test_d10_what_fails_leaves_nothing_in_the_prefix(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "d", random_shards(3, [[50], [90_000]]))
    path = tmp_path / "d" / "shard-00001.tokens.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(samples, "SHARD_BYTES", 100)
    for form in FORMATS:
        with pytest.raises(ValidationError, match="have changed"):
            export(str(tmp_path / "d"), form, prefix)
        assert objects(prefix) == {}


def test_d10_a_killed_export_has_no_receipt_and_the_same_command_makes_it_whole(
    prefix: str, tmp_path: Path
) -> None:
    shards = random_shards(4, [[5], [6]])
    write_dataset(tmp_path / "d", shards)
    write_dataset(tmp_path / "other", [[[1]]])
    code = (
        "import os, sys; from olm_data.exporting.export import export; "
        "export(*sys.argv[1:], watch=lambda tokens, total: os._exit(9))"
    )
    killed = [sys.executable, "-c", code, str(tmp_path / "d"), "olmo-core", prefix]
    assert subprocess.run(killed, env=dict(os.environ)).returncode == 9
    left = objects(prefix)
    assert RECORD not in left
    assert {CLAIM, "shard-00000.npy", "shard-00000.csv.gz"} < set(left)
    for target, form in (("other", "olmo-core"), ("d", "mds")):
        with pytest.raises(ConflictError, match="another export was begun"):
            export(str(tmp_path / target), form, prefix)
    assert {k: v for k, v in objects(prefix).items() if not k.startswith(".lease")} == {
        k: v for k, v in left.items() if not k.startswith(".lease")
    }
    assert export(str(tmp_path / "d"), "olmo-core", prefix).status == "written"
    wanted = [(f"doc-{n}", ids.tolist()) for n, (ids,) in enumerate(shards)]
    there = fetched(prefix, tmp_path / "there")
    assert exported.olmo_core(there, "uint16") == wanted
    assert set(objects(prefix)) == {RECORD, *json.loads((there / RECORD).read_text())["files"]}


def test_d10_two_at_once_on_one_prefix_are_refused(prefix: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]])

    def second(tokens: int, total: int) -> None:
        with pytest.raises(ConflictError, match="another process"):
            export(str(tmp_path / "d"), "hf", prefix)

    assert export(str(tmp_path / "d"), "mds", prefix, watch=second).status == "written"


def test_d10_a_bucket_that_is_not_there_is_said_at_once(s3: dict[str, str], tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]])
    with pytest.raises(StorageError, match="does not exist"):
        export(str(tmp_path / "d"), "mds", "s3://no-such-bucket-here/out")
