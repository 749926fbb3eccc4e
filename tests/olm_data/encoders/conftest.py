"""The small tokenizer, and a cache of proofs for one test."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer


@pytest.fixture(scope="module")
def spec(tiny_tokenizer: Path) -> TokenizerSpec:
    return load_tokenizer(tiny_tokenizer)


@pytest.fixture(scope="module")
def small(tiny_tokenizer: Path) -> bytes:
    return tiny_tokenizer.read_bytes()


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests here sweep parts of Unicode: what they prove is for no other test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
