"""A dataset with a validation split, and a copy of it to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.tokenizing import make_dataset, texts, write_jsonl


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A dataset of several shards with a validation split."""
    folder = tmp_path_factory.mktemp("verify")
    source = write_jsonl(folder / "a.jsonl", [*texts(80), "", " "])
    make_dataset([source], tiny_tokenizer, folder / "out", shard_tokens=300, holdout="1/8")
    return folder / "out"


@pytest.fixture
def dataset(made: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(made, tmp_path / "out"))
