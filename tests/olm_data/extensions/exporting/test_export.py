"""Promises of `olm-data export`: the same documents in others' files, or a clear refusal."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import exported
from support.command import Olm
from support.forged import flip
from support.small_datasets import random_shards, write_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, ResourceError, UsageError, ValidationError
from olm_data.extensions.exporting import base, samples, token_files
from olm_data.extensions.exporting.base import document_batches
from olm_data.extensions.exporting.export import FORMATS, MERGED, export
from olm_data.extensions.exporting.token_files import for_people
from olm_data.extensions.importing.borders import read_index
from olm_data.storage.destination import RECORD

LENGTHS = [[3, 1, 300, 2], [1], [70_000, 5, 255, 256]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("form", FORMATS)
def test_an_independent_reader_finds_the_same_documents(
    tmp_path: Path, form: str, dtype: str
) -> None:
    shards = random_shards(1, LENGTHS, 50_000 if dtype == "uint16" else 2_000_000_000)
    write_dataset(tmp_path / "d", shards, dtype=dtype, vocab_size=2_000_000_000)
    done = export(str(tmp_path / "d"), form, str(tmp_path / "out"))
    assert exported.READERS[form](tmp_path / "out", dtype) == exported.wanted(shards, form)
    assert (done.status, done.documents, done.tokens, done.linked) == ("written", 9, 70_823, 0)
    files = {name: len(data) for name, data in contents(tmp_path / "out").items()}
    assert done.files == {name: size for name, size in files.items() if name != RECORD}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=9), min_size=1, max_size=3)
)
def test_any_cut_into_pieces_gives_the_same_documents(
    tmp_path_factory: pytest.TempPathFactory, form: str, lengths: list[list[int]]
) -> None:
    folder, shards = tmp_path_factory.mktemp("any"), random_shards(3, lengths)
    write_dataset(folder / "d", shards)
    with pytest.MonkeyPatch.context() as patch:
        for module in (base, samples, token_files, *map(_module, FORMATS)):
            patch.setattr(module, "PIECE", 3, raising=False)
        patch.setattr(samples, "SHARD_BYTES", 600)
        patch.setattr(_module("hf"), "BATCH_TOKENS", 7)
        export(str(folder / "d"), form, str(folder / "out"))
        if form in MERGED:
            export(str(folder / "d"), form, str(folder / "merged"), merge=True)
            assert exported.READERS[form](folder / "merged", "uint16") == exported.wanted(
                shards, form
            )
    assert exported.READERS[form](folder / "out", "uint16") == exported.wanted(shards, form)
    shutil.rmtree(folder)


def _module(form: str) -> object:

    return sys.modules[FORMATS[form].__module__]


@pytest.mark.parametrize("container", ["raw", "npy"])
def test_damaged_tokens_are_neither_linked_nor_copied(tmp_path: Path, container: str) -> None:
    write_dataset(tmp_path / "d", random_shards(4, [[90_000]]), container=container)
    (path,) = (tmp_path / "d").glob("*.tokens.*")
    flip(path, 100_000)
    for form in FORMATS:
        with pytest.raises(ValidationError, match="have changed"):
            export(str(tmp_path / "d"), form, str(tmp_path / form))
        assert not (tmp_path / form).exists()
    assert not list(tmp_path.glob(".*"))


def test_wrong_arguments_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]])
    dataset = str(tmp_path / "d")
    with pytest.raises(UsageError, match="'megatron'"):
        export(dataset, "megatrn", str(tmp_path / "out"))
    with pytest.raises(UsageError, match="lock"):
        export("mix.lock.json", "hf", str(tmp_path / "out"))
    with pytest.raises(UsageError, match="has no effect on hf"):
        export(dataset, "hf", str(tmp_path / "out"), merge=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="in the way"):
        export(dataset, "hf", str(tmp_path / "file" / "out"))


def test_the_same_dataset_gives_the_same_bytes(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", random_shards(7, LENGTHS))
    for form in FORMATS:
        one, other = tmp_path / f"{form}-1", tmp_path / f"{form}-2"
        export(str(tmp_path / "d"), form, str(one))
        export(str(tmp_path / "d"), form, str(other))
        assert contents(one) == contents(other)


def test_a_dataset_of_nothing_exports_to_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [])
    assert Dataset.open(str(tmp_path / "d")).tokens == 0
    for form in ("olmo-core", "megatron", "datatrove", "mds", "litdata"):
        assert export(str(tmp_path / "d"), form, str(tmp_path / form)).documents == 0


# The folder that `datasets` loads: kept columns and null ids.
def test_hf_holds_the_kept_columns_and_null_ids(tmp_path: Path) -> None:
    import datasets

    columns = {"id": pa.array(["a", None, "c"]), "score": pa.array([0.5, None, 2.0])}
    write_dataset(tmp_path / "d", [[[1, 2], [3]], [[4]]], columns=columns)
    done = export(str(tmp_path / "d"), "hf", str(tmp_path / "out"))
    assert datasets.load_from_disk(str(tmp_path / "out")).to_list() == [
        {"id": "a", "input_ids": [1, 2], "score": 0.5},
        {"id": None, "input_ids": [3], "score": None},
        {"id": "c", "input_ids": [4], "score": 2.0},
    ]
    assert not any("kept columns" in sentence for sentence in done.lost)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), most=st.integers(1, 60))
def test_batches_hold_each_document_once_and_no_more_tokens_than_asked(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], most: int
) -> None:
    folder = tmp_path_factory.mktemp("d")
    write_dataset(folder, random_shards(1, [lengths]))
    shard = Dataset.open(str(folder)).open_shard(0)
    ids: list[str] = []
    ends: list[int] = []
    for first, batch, rows in document_batches(shard, ["id"], most):
        assert first == (ends[-1] if ends else 0)
        assert len(batch) == rows.num_rows
        assert len(batch) == 1 or int(batch[-1]) - first <= most
        ends += batch.tolist()
        ids += rows.column("id").to_pylist()
    assert ends == shard.ends.tolist()
    assert ids == [f"doc-{n}" for n in range(len(lengths))]


LINKED = ("olmo-core", "megatron", "datatrove")


def test_what_a_format_cannot_hold_is_said(tmp_path: Path, olm: Olm) -> None:
    write_dataset(tmp_path / "d", [[[1, 2]]], columns={"score": pa.array([0.5])}, eos=2)
    write_dataset(tmp_path / "d" / "validation", [[[3]]])
    for form in FORMATS:
        said = olm("export", tmp_path / "d", "--to", form, "--output", tmp_path / form)
        assert said.returncode == 0, said.stderr
        assert "documents  1\ntokens     2\n" in said.stdout
        assert "next:" in said.stderr
        assert f"held-out documents; export {tmp_path / 'd'}/validation" in said.stdout
        assert ("kept columns score" in said.stdout) == (form not in exported.HOLDS_COLUMNS)
        assert ("ids" in said.stdout.split("each document")[0]) == (form not in exported.HOLDS_IDS)
        assert "no EOS" not in said.stdout
    write_dataset(tmp_path / "bare", [[[1, 2]]])
    for form in ("olmo-core", "megatron"):
        done = export(str(tmp_path / "bare"), form, str(tmp_path / f"bare-{form}"))
        assert any("documents have no EOS" in sentence for sentence in done.lost)


def test_a_dry_run_writes_nothing_and_says_what_would_be_linked(tmp_path: Path, olm: Olm) -> None:
    write_dataset(tmp_path / "d", [[[1]], [[2, 3]]], container="raw")
    before = sorted(tmp_path.rglob("*"))
    words = ("--output", tmp_path / "x" / "out", "--dry-run", "--json")
    for form in FORMATS:
        said = olm("export", tmp_path / "d", "--to", form, *words)
        result = json.loads(said.stdout)
        assert (result["status"], result["tokens"]) == ("would write", 3)
        assert result["linked"] == (2 if form in LINKED else 0)
    assert sorted(tmp_path.rglob("*")) == before


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


@pytest.mark.parametrize(
    ("form", "name"), [("mds", "tokens"), ("litdata", "tokens"), ("hf", "input_ids")]
)
def test_a_kept_column_named_as_the_tokens_is_refused(tmp_path: Path, form: str, name: str) -> None:
    write_dataset(tmp_path / "d", [[[1]]], columns={name: pa.array([1])})
    with pytest.raises(InputError, match=f"called {name}"):
        export(str(tmp_path / "d"), form, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", LINKED)
def test_headerless_tokens_are_linked_and_the_files_are_those_of_a_copy(
    tmp_path: Path, form: str
) -> None:
    shards = random_shards(2, LENGTHS)
    write_dataset(tmp_path / "raw", shards, container="raw")
    write_dataset(tmp_path / "npy", shards)
    linked = export(str(tmp_path / "raw"), form, str(tmp_path / "linked"))
    copied = export(str(tmp_path / "npy"), form, str(tmp_path / "copied"))
    assert (linked.linked, copied.linked) == (3, 0)
    suffix = {"olmo-core": "npy", "megatron": "bin", "datatrove": "ds"}[form]
    for number in range(3):
        name = f"shard-{number:05d}"
        theirs = tmp_path / "linked" / f"{name}.{suffix}"
        assert os.path.samefile(tmp_path / "raw" / f"{name}.tokens.bin", theirs)
    one, other = contents(tmp_path / "linked"), contents(tmp_path / "copied")
    metadata = [name for name in one if name.endswith((".metadata", RECORD))]
    assert {k: v for k, v in one.items() if k not in metadata} == {
        k: v for k, v in other.items() if k not in metadata
    }


def test_olmo_core_provenance_names_id_source_and_line(tmp_path: Path) -> None:
    names = pa.array(['a,"b"', None, "two\nlines\r", "ü\u2028"])
    write_dataset(tmp_path / "d", [[[1, 2], [3], [4], [5]]], columns={"id": names})
    done = export(str(tmp_path / "d"), "olmo-core", str(tmp_path / "out"))
    path = tmp_path / "out" / "shard-00000.npy"
    assert exported.provenance(path) == [
        ["0", "2", 'a,"b"', "input.jsonl", "1"],
        ["2", "3", "", "input.jsonl", "2"],
        ["3", "4", "two\\nlines\\r", "input.jsonl", "3"],
        ["4", "5", "ü\u2028", "input.jsonl", "4"],
    ]
    said = " ".join(done.lost)
    assert "1 documents have no id" in said
    assert "1 ids or paths held line breaks" in said


@pytest.mark.parametrize("merge", [False, True])
def test_ids_and_documents_too_large_for_megatron_are_refused(
    merge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "d", [[[2**31]]], dtype="uint32", vocab_size=2**32 - 1)
    with pytest.raises(InputError, match="too large"):
        export(str(tmp_path / "d"), "megatron", str(tmp_path / "out"), merge=merge)
    write_dataset(tmp_path / "long", [[[1, 2]], [[1, 2, 3, 3]]])
    monkeypatch.setattr(token_files, "MOST", 3)
    with pytest.raises(InputError, match="4 tokens"):
        export(str(tmp_path / "long"), "megatron", str(tmp_path / "out"), merge=merge)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(0, "0.00 T"), (7, "7.00 T"), (123, "123 T"), (1234, "1.23 kT"), (56_789_000, "56.8 MT")],
)
def test_token_counts_for_people_are_those_of_datatrove(tokens: int, text: str) -> None:
    assert for_people(tokens) == text


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_one_megatron_prefix_holds_all_shards(tmp_path: Path, dtype: str) -> None:
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


def test_a_merged_export_is_another_than_one_by_shards(tmp_path: Path, olm: Olm) -> None:
    write_dataset(tmp_path / "d", [[[1, 2]], [[3]]])
    words = ("export", tmp_path / "d", "--to", "megatron", "--merge", "--output", tmp_path / "out")
    said = olm(*words)
    assert f"--data-path {tmp_path / 'out'}/dataset" in said.stderr
    assert "status     already there\n" in olm(*words).stdout
    with pytest.raises(ConflictError):
        export(str(tmp_path / "d"), "megatron", str(tmp_path / "out"))
