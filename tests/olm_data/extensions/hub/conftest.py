"""A hub that can be written to, and a dataset with a held-out part to write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_stub import HubStub
from support.tokenizing import make_dataset, texts, write_jsonl


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """An empty hub, to which this process's client speaks."""
    from huggingface_hub import constants

    (tmp_path / "hub").mkdir()
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # read at import
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield stub


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A dataset of some shards, with a held-out part and a column of licences."""
    folder = tmp_path_factory.mktemp("publish")
    source = write_jsonl(folder / "books.jsonl", texts(80))
    make_dataset(
        [source], tiny_tokenizer, folder / "books", shard_tokens=500, id_column="id", holdout=0.1
    )
    return folder / "books"
