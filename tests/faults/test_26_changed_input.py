"""FAULTS rows 26 and 27: an input named twice, or one that changes under our hands."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from support.inline_runner import Around
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ConflictError, InputError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(60))


def test_26_the_same_file_named_twice_is_refused(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="twice"):
        make_dataset([source, source], tiny_tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_26_the_same_content_under_two_names_is_refused_before_work_unless_allowed(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    other = write_jsonl(tmp_path / "b.jsonl", texts(60))
    other.write_bytes(source.read_bytes())
    out = tmp_path / "out"
    with pytest.raises(InputError, match="two inputs have the same content") as caught:
        make_dataset([source, other], tiny_tokenizer, out)
    assert caught.value.where == "a.jsonl and b.jsonl"
    assert [path for path in out.rglob("*") if path.is_file()] == []
    made = make_dataset([source, other], tiny_tokenizer, out, allow_duplicates=True)
    assert made.manifest.tools.copies.duplicates == 60


def test_27_an_input_edited_between_plan_and_reading_is_refused(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    def edit() -> None:
        write_jsonl(source, texts(60, 7))
        os.utime(source, ns=(1, 1))

    with pytest.raises(InputError, match="changed") as caught:
        make_dataset(
            [source], tiny_tokenizer, tmp_path / "out", shard_tokens=500, runner=Around(edit, at=2)
        )
    assert caught.value.where == "a.jsonl"
    kept = sorted(path.name for path in (tmp_path / "out").glob("shard-*.json"))
    assert kept == ["shard-00000.json", "shard-00001.json"]  # read before it changed
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_27_a_read_error_caused_by_the_change_is_reported_as_the_change(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    plain = write_jsonl(tmp_path / "plain", texts(400))
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(plain.read_bytes()))

    def truncate() -> None:
        source.write_bytes(source.read_bytes()[:300])

    with pytest.raises(InputError, match="changed while it was being read"):
        make_dataset([source], tiny_tokenizer, tmp_path / "out", runner=Around(truncate))


def test_27_an_input_changed_since_an_earlier_partial_run_is_refused(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_dataset(
            [source], tiny_tokenizer, tmp_path / "out", shard_tokens=500, runner=Around(stop, at=2)
        )
    os.utime(source, ns=(1, 1))
    with pytest.raises(ConflictError, match="beginning of another dataset") as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / "out", shard_tokens=500)
    assert "input a.jsonl: changed since" in str(caught.value)
