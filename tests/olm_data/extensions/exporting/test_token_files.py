"""Token files of others: what describes them, links instead of copies, one Megatron prefix."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support import exported
from support.command import Olm
from support.small_datasets import random_shards, write_dataset

from olm_data.errors import ConflictError, InputError
from olm_data.extensions.exporting import token_files
from olm_data.extensions.exporting.export import export
from olm_data.extensions.exporting.token_files import for_people
from olm_data.extensions.importing.borders import read_index
from olm_data.storage.destination import RECORD

LENGTHS = [[3, 1, 300, 2], [1], [70_000, 5, 255, 256]]


LINKED = ("olmo-core", "megatron", "datatrove")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


def test_ids_and_documents_too_large_for_megatron_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "d", [[[2**31]]], dtype="uint32", vocab_size=2**32 - 1)
    with pytest.raises(InputError, match="too large"):
        export(str(tmp_path / "d"), "megatron", str(tmp_path / "out"))
    write_dataset(tmp_path / "long", [[[1, 2, 3, 3]]])
    monkeypatch.setattr(token_files, "MOST", 3)
    with pytest.raises(InputError, match="4 tokens"):
        export(str(tmp_path / "long"), "megatron", str(tmp_path / "out"))


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


def test_a_document_too_long_for_megatron_is_refused_when_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "d", [[[1, 2]], [[1, 2, 3, 3]]])
    monkeypatch.setattr(token_files, "MOST", 3)
    with pytest.raises(InputError, match="4 tokens"):
        export(str(tmp_path / "d"), "megatron", str(tmp_path / "out"), merge=True)
    assert not (tmp_path / "out").exists()
