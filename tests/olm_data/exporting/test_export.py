"""Promises of `olm-data export`: the same documents in others' files, or a clear refusal."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import exported
from support.command import inside
from support.datasets import random_shards, write_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, ResourceError, UsageError, ValidationError
from olm_data.exporting import base, megatron, samples
from olm_data.exporting.datatrove import for_people
from olm_data.exporting.destination import RECORD
from olm_data.exporting.export import FORMATS, MERGED, export

LENGTHS = [[3, 1, 300, 2], [1], [70_000, 5, 255, 256]]
LINKED = ("olmo-core", "megatron", "datatrove")


def wanted(shards: list[list[np.ndarray]], form: str) -> exported.Documents:
    documents = [document.tolist() for shard in shards for document in shard]
    holds = form in exported.HOLDS_IDS
    return [(f"doc-{n}" if holds else None, ids) for n, ids in enumerate(documents)]


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
    assert exported.READERS[form](tmp_path / "out", dtype) == wanted(shards, form)
    assert (done.status, done.documents, done.tokens, done.linked) == ("written", 9, 70_823, 0)
    files = {name: len(data) for name, data in contents(tmp_path / "out").items()}
    assert done.files == {name: size for name, size in files.items() if name != RECORD}
    assert not list(tmp_path.glob(".*"))


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
        for module in (base, megatron, samples, *map(_module, FORMATS)):
            patch.setattr(module, "PIECE", 3, raising=False)
        patch.setattr(samples, "SHARD_BYTES", 600)
        patch.setattr(_module("hf"), "BATCH_TOKENS", 7)
        export(str(folder / "d"), form, str(folder / "out"))
        if form in MERGED:
            export(str(folder / "d"), form, str(folder / "merged"), merge=True)
            assert exported.READERS[form](folder / "merged", "uint16") == wanted(shards, form)
    assert exported.READERS[form](folder / "out", "uint16") == wanted(shards, form)
    shutil.rmtree(folder)


def _module(form: str) -> object:
    import sys

    return sys.modules[FORMATS[form].__module__]


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


def test_hf_refuses_a_kept_column_named_as_the_tokens(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]], columns={"input_ids": pa.array([1])})
    with pytest.raises(InputError, match="input_ids"):
        export(str(tmp_path / "d"), "hf", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_a_format_cannot_hold_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "d", [[[1, 2]]], columns={"score": pa.array([0.5])}, eos=2)
    write_dataset(tmp_path / "d" / "validation", [[[3]]])
    for form in FORMATS:
        said = inside(capsys, "export", tmp_path / "d", "--to", form, "--output", tmp_path / form)
        assert said.returncode == 0, said.stderr
        assert "1 documents, 2 tokens" in said.stdout
        assert "next:" in said.stderr
        assert f"held-out documents; export {tmp_path / 'd'}/validation" in said.stdout
        assert ("kept columns score" in said.stdout) == (form not in exported.HOLDS_COLUMNS)
        assert ("ids" in said.stdout.split("each document")[0]) == (form not in exported.HOLDS_IDS)
        assert "no EOS" not in said.stdout
    write_dataset(tmp_path / "bare", [[[1, 2]]])
    for form in ("olmo-core", "megatron"):
        done = export(str(tmp_path / "bare"), form, str(tmp_path / f"bare-{form}"))
        assert any("documents have no EOS" in sentence for sentence in done.lost)


def test_a_second_run_does_nothing_and_another_export_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1, 2], [3]]])
    write_dataset(tmp_path / "other", [[[9]]])
    out = tmp_path / "out"
    first = export(str(tmp_path / "d"), "mds", str(out))
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = export(str(tmp_path / "d"), "mds", str(out))
    assert again.status == "already there"
    assert again.files == first.files
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    for target, form in (("other", "mds"), ("d", "hf")):
        with pytest.raises(ConflictError, match="something else"):
            export(str(tmp_path / target), form, str(out))
    (out / "shard.00000.mds").write_bytes(b"short")
    with pytest.raises(ConflictError, match="not as it was written"):
        export(str(tmp_path / "d"), "mds", str(out))


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]])
    (tmp_path / "out").mkdir()
    assert export(str(tmp_path / "d"), "hf", str(tmp_path / "out")).status == "written"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(ConflictError, match="not empty"):
        export(str(tmp_path / "d"), "hf", str(tmp_path / "full"))
    assert contents(tmp_path / "full") == {"mine": b"mine"}


@pytest.mark.parametrize("container", ["raw", "npy"])
def test_damaged_tokens_are_neither_linked_nor_copied(tmp_path: Path, container: str) -> None:
    write_dataset(tmp_path / "d", random_shards(4, [[90_000]]), container=container)
    (path,) = (tmp_path / "d").glob("*.tokens.*")
    data = bytearray(path.read_bytes())
    data[100_000] ^= 1
    path.write_bytes(data)
    for form in FORMATS:
        with pytest.raises(ValidationError, match="have changed"):
            export(str(tmp_path / "d"), form, str(tmp_path / form))
        assert not (tmp_path / form).exists()
    assert not list(tmp_path.glob(".*"))


def test_a_killed_run_leaves_no_output_and_the_next_one_is_whole(tmp_path: Path) -> None:
    shards = random_shards(5, [[5], [6]])
    write_dataset(tmp_path / "d", shards)
    out, stale = tmp_path / "out", tmp_path / ".out.exporting-000001"

    def kill(tokens: int, total: int) -> None:
        os._exit(9)

    child = os.fork()
    if child == 0:
        export(str(tmp_path / "d"), "megatron", str(out), watch=kill)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not out.exists()
    assert list(stale.iterdir())
    export(str(tmp_path / "d"), "megatron", str(out))
    assert exported.megatron(out, "uint16") == wanted(shards, "megatron")
    assert not list(tmp_path.glob(".*"))


def test_two_at_once_on_one_output_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]])
    out = str(tmp_path / "out")

    def second(tokens: int, total: int) -> None:
        with pytest.raises(ConflictError, match="another process"):
            export(str(tmp_path / "d"), "hf", out)

    assert export(str(tmp_path / "d"), "mds", out, watch=second).status == "written"


def test_a_dry_run_writes_nothing_and_says_what_would_be_linked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "d", [[[1]], [[2, 3]]], container="raw")
    before = sorted(tmp_path.rglob("*"))
    words = ("--output", tmp_path / "x" / "out", "--dry-run", "--json")
    for form in FORMATS:
        said = inside(capsys, "export", tmp_path / "d", "--to", form, *words)
        result = json.loads(said.stdout)
        assert (result["status"], result["tokens"]) == ("would write", 3)
        assert result["linked"] == (2 if form in LINKED else 0)
    assert sorted(tmp_path.rglob("*")) == before


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


def test_ids_and_documents_too_large_for_megatron_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "d", [[[2**31]]], dtype="uint32", vocab_size=2**32 - 1)
    with pytest.raises(InputError, match="too large"):
        export(str(tmp_path / "d"), "megatron", str(tmp_path / "out"))
    write_dataset(tmp_path / "long", [[[1, 2, 3, 3]]])
    monkeypatch.setattr(megatron, "MOST", 3)
    with pytest.raises(InputError, match="4 tokens"):
        export(str(tmp_path / "long"), "megatron", str(tmp_path / "out"))


def test_mds_shards_stay_below_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SHARD_BYTES", 2000)
    shards = random_shards(6, [[10] * 100, [2000, 3]])
    write_dataset(tmp_path / "d", shards)
    export(str(tmp_path / "d"), "mds", str(tmp_path / "out"))
    assert exported.mds(tmp_path / "out", "uint16") == wanted(shards, "mds")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").glob("*.mds"))]
    assert len(sizes) > 2
    assert [size for size in sizes if size > 2000] == [max(sizes)]


def test_the_same_dataset_gives_the_same_bytes(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", random_shards(7, LENGTHS))
    for form in FORMATS:
        one, other = tmp_path / f"{form}-1", tmp_path / f"{form}-2"
        export(str(tmp_path / "d"), form, str(one))
        export(str(tmp_path / "d"), form, str(other))
        assert contents(one) == contents(other)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(0, "0.00 T"), (7, "7.00 T"), (123, "123 T"), (1234, "1.23 kT"), (56_789_000, "56.8 MT")],
)
def test_token_counts_for_people_are_those_of_datatrove(tokens: int, text: str) -> None:
    assert for_people(tokens) == text


def test_a_dataset_of_nothing_exports_to_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [])
    assert Dataset.open(str(tmp_path / "d")).tokens == 0
    for form in ("olmo-core", "megatron", "datatrove", "mds", "litdata"):
        assert export(str(tmp_path / "d"), form, str(tmp_path / form)).documents == 0
