"""A tokenizer that is loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer


@pytest.fixture(scope="session")
def spec(tiny_tokenizer: Path) -> TokenizerSpec:
    return load_tokenizer(tiny_tokenizer)
