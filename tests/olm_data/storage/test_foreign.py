"""No output is made among a user's own files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ConflictError, UsageError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(5))


@pytest.mark.parametrize("name", ["thesis.tex", ".git", "plan.json", "manifest.json", "shard-0"])
def test_a_folder_with_files_of_the_user_is_no_output(
    text: Path, tiny_tokenizer: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    (folder / name).write_text("{}")
    with pytest.raises(UsageError, match="files that are not of a dataset") as caught:
        make_dataset([text], tiny_tokenizer, folder)
    assert "notes" in str(caught.value) or name in str(caught.value)
    assert {path.name for path in folder.iterdir()} == {"notes", name}


def test_the_working_folder_is_an_output_only_if_it_is_empty(
    text: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        make_dataset([text], tiny_tokenizer, ".")
    monkeypatch.chdir(tmp_path / "here")
    done = make_dataset([text], tiny_tokenizer, ".")
    assert done.manifest.totals.documents == 5


def test_a_note_laid_into_a_dataset_later_is_no_reason_to_refuse_it(
    text: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset([text], tiny_tokenizer, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("what this is")
    assert make_dataset([text], tiny_tokenizer, tmp_path / "out").already_complete
    with pytest.raises(ConflictError):  # and another dataset is still another
        make_dataset([text], tiny_tokenizer, tmp_path / "out", holdout="0.5")


def test_a_prefix_on_s3_with_other_objects_is_no_output(
    text: Path, tiny_tokenizer: Path, s3: dict[str, str]
) -> None:
    from support.s3 import client

    client(s3).put_object(Bucket=s3["bucket"], Key="d4/own/thesis.tex", Body=b"mine")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        make_dataset([text], tiny_tokenizer, f"s3://{s3['bucket']}/d4/own")
    make_dataset([text], tiny_tokenizer, f"s3://{s3['bucket']}/d4/own/tokens")
