"""Samples: kept columns keep their types, files stay below their limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import exported
from support.small_datasets import random_shards, write_dataset

from olm_data.errors import InputError
from olm_data.extensions.exporting import samples
from olm_data.extensions.exporting.export import export


def test_mds_shards_stay_below_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SHARD_BYTES", 2000)
    shards = random_shards(6, [[10] * 100, [2000, 3]])
    write_dataset(tmp_path / "d", shards)
    export(str(tmp_path / "d"), "mds", str(tmp_path / "out"))
    assert exported.mds(tmp_path / "out", "uint16") == exported.wanted(shards, "mds")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").glob("*.mds"))]
    assert len(sizes) > 2
    assert [size for size in sizes if size > 2000] == [max(sizes)]


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


def test_mds_holds_kept_columns_with_their_types(with_columns: str, tmp_path: Path) -> None:
    done = export(with_columns, "mds", str(tmp_path / "out"))
    rows = exported.mds_rows(tmp_path / "out", "uint16")
    assert [{k: v for k, v in row.items() if k not in ("id", "tokens")} for row in rows] == ROWS
    assert [row["tokens"] for row in rows] == [[1, 2], [3], [4]]
    shard = json.loads((tmp_path / "out" / "index.json").read_text())["shards"][0]
    assert shard["column_encodings"][2:] == [mds for _, mds, _ in COLUMNS.values()]
    assert not any("kept columns" in sentence for sentence in done.lost)


def test_litdata_holds_kept_columns_with_their_types(with_columns: str, tmp_path: Path) -> None:
    done = export(with_columns, "litdata", str(tmp_path / "out"))
    rows = exported.litdata_rows(tmp_path / "out", "uint16")
    for row, wanted in zip(rows, ROWS, strict=True):
        as_text = {name: json.loads(row[name]) for name in ("hole", "name")}
        assert {k: v for k, v in (row | as_text).items() if k in wanted} == wanted
    config = json.loads((tmp_path / "out" / "index.json").read_text())["config"]
    assert config["data_format"][2:] == [kind for _, _, kind in COLUMNS.values()]
    assert "as JSON text, as they hold nulls: kept columns hole, name" in done.lost


@pytest.mark.parametrize("form", ["mds", "litdata"])
def test_a_kept_column_named_as_the_tokens_is_refused(tmp_path: Path, form: str) -> None:
    write_dataset(tmp_path / "d", [[[1]]], columns={"tokens": pa.array([1])})
    with pytest.raises(InputError, match="called tokens"):
        export(str(tmp_path / "d"), form, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("form", "package"), [("mds", "streaming"), ("litdata", "litdata")])
def test_the_projects_own_reader_finds_the_same_rows(
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
