"""What each token adds to the text, and the bytes of a byte-level tokenizer's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.extensions.show.token_text import token_bytes, token_texts
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer


@pytest.fixture(scope="module")
def spec(tiny_tokenizer: Path) -> TokenizerSpec:
    return load_tokenizer(tiny_tokenizer)


@given(ids=st.lists(st.integers(0, 511), max_size=60))
def test_the_texts_of_tokens_make_the_decoded_text_whatever_the_ids(
    ids: list[int], spec: TokenizerSpec
) -> None:
    table = token_bytes(spec)
    texts = token_texts(spec, ids, table)
    assert len(texts) == len(ids)
    assert "".join(texts) == spec.decode(ids)
    data, ends = table.join(np.array(ids, np.uint16))
    assert len(ends) == len(ids)
    assert data.tobytes().decode(errors="replace") == spec.decode(ids)


def test_a_character_of_several_tokens_belongs_to_the_last_of_them(tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    ids = spec.encode("a\U0001f600b")
    texts = token_texts(spec, ids, token_bytes(spec))
    assert [text for text in texts if text] == ["a", "\U0001f600", "b"]
    assert len(texts) == 6
