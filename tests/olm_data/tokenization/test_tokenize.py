"""Tokenising: every document in, in order, once; the account of all others; reruns and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.project import Project
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ConflictError, ValidationError
from olm_data.select.selection import content_hashes, document_digests


# --- what is written ---------------------------------------------------------------------------
def test_every_document_is_there_once_in_input_order_across_shards(project: Project) -> None:
    made = project.make(project.inputs, shard_tokens=300)
    assert len(made.manifest.shards) > 5
    assert project.texts(verify="full") == texts(120)


def test_content_hashes_are_of_the_text(project: Project) -> None:
    project.make(project.inputs[:1])
    rows = pq.read_table(project.out / "shard-00000.docs.parquet")
    expected = [
        int.from_bytes(xxhash.xxh3_128_digest(text.encode())[:8], "little") for text in texts(40)
    ]
    assert rows["content_hash"].to_pylist() == expected


def test_a_vocabulary_above_65536_is_stored_as_uint32(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{n}": n + 1 for n in range(70_000)} | {"<|endoftext|>": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "a.jsonl", ["w1 w69999 w65535 w65536"])
    made = make_dataset([tmp_path / "a.jsonl"], tmp_path / "tokenizer.json", tmp_path / "out")
    assert made.manifest.dtype == "uint32"
    stored = np.load(tmp_path / "out" / "shard-00000.tokens.npy", mmap_mode="r")
    assert stored.tolist() == [2, 70_000, 65_536, 65_537, 0]


# --- holdout -----------------------------------------------------------------------------------


# --- reruns ------------------------------------------------------------------------------------
def test_a_rerun_of_a_complete_dataset_does_nothing(project: Project) -> None:
    first = project.make(project.inputs, holdout="1/8")
    before = {path: path.stat().st_mtime_ns for path in project.out.rglob("*") if path.is_file()}
    again = project.make(project.inputs, holdout="1/8")
    assert again.already_complete
    assert again.manifest == first.manifest
    assert before == {
        path: path.stat().st_mtime_ns for path in project.out.rglob("*") if path.is_file()
    }


def test_other_options_or_inputs_on_the_same_output_are_refused_and_named(project: Project) -> None:
    project.make(project.inputs)
    with pytest.raises(ConflictError, match="another dataset") as caught:
        project.make(project.inputs, holdout="1/8", eos="none")
    assert "holdout: '0' there, '1/8' now" in str(caught.value)
    assert "eos: " in str(caught.value)
    with pytest.raises(ConflictError) as caught:
        project.make(project.inputs[:2])
    assert "input 2.jsonl: gone" in str(caught.value)
    assert "--output" in str(caught.value.fix)


def test_a_damaged_plan_is_refused_not_overwritten(project: Project) -> None:
    project.make(project.inputs)
    (project.out / "plan.json").write_bytes(b"{")
    with pytest.raises(ValidationError, match="plan"):
        project.make(project.inputs)


def test_no_staging_folder_and_no_lock_is_left(project: Project) -> None:
    project.make(project.inputs, holdout="1/8")
    assert not list((project.out).rglob(".*"))


# --- values ------------------------------------------------------------------------------------
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=10))
def test_digests_and_hashes_are_those_of_each_document(documents: list[bytes]) -> None:
    data = np.frombuffer(b"".join(documents), np.uint8)
    raw = document_digests(data, np.cumsum([0, *map(len, documents)]))
    assert raw == b"".join(xxhash.xxh3_128_digest(document) for document in documents)
    assert content_hashes(raw).tolist() == [
        int.from_bytes(xxhash.xxh3_128_digest(document)[:8], "little") for document in documents
    ]
