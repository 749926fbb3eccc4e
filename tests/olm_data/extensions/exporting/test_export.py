"""Promises of `olm-data export`: the same documents in others' files, or a clear refusal."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import exported
from support.forged import flip
from support.small_datasets import random_shards, write_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, ResourceError, UsageError, ValidationError
from olm_data.extensions.exporting import base, samples, token_files
from olm_data.extensions.exporting.export import FORMATS, MERGED, export
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


def test_hf_refuses_a_kept_column_named_as_the_tokens(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]], columns={"input_ids": pa.array([1])})
    with pytest.raises(InputError, match="input_ids"):
        export(str(tmp_path / "d"), "hf", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
