"""Row 22: text that spells a special token stays text: no special id is ever inside a document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olm_data.encoders import make_encoder
from olm_data.encoders.base import concatenate, special_ids
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer

NAMES = ["gpt2", "dolma2", "gpt-neox-dolma", "bert-uncased"]


def promise(spec: TokenizerSpec, encoder: str, texts: list[str]) -> None:
    encoded = make_encoder(encoder, spec, "plain").encode(*concatenate(t.encode() for t in texts))
    assert not np.isin(encoded.ids, special_ids(spec)).any()
    assert encoded.special_hits == sum(
        t.count(token) for t in texts for token in spec.special_tokens
    )
    for k, text in enumerate(texts):
        row = encoded.ids[encoded.offsets[k] : encoded.offsets[k + 1]]
        assert row.tolist() == spec.encode(text)
        if spec.lossless:
            assert spec.decode(row) == text


@pytest.mark.parametrize("encoder", ["hf", "gigatoken"])
def test_each_special_token_alone_and_inside_words_is_text(
    tiny_tokenizer: Path, encoder: str
) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    promise(spec, encoder, ["<|endoftext|>", "a<|endoftext|>b", "<|endoftext|>" * 50, "<|endof"])


@settings(max_examples=60)
@given(
    parts=st.lists(
        st.one_of(st.just("<|endoftext|>"), st.text("<|>endoftx \n", max_size=8)), max_size=10
    )
)
def test_no_text_makes_a_special_id(tiny_tokenizer: Path, parts: list[str]) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    for encoder in ("hf", "gigatoken"):
        promise(spec, encoder, ["".join(parts), *parts])


@pytest.mark.parametrize("name", NAMES)
def test_no_special_token_of_a_real_tokenizer_gets_into_a_document(
    shared_data: Path, name: str
) -> None:
    spec = load_tokenizer(
        shared_data / "tokenizers" / name, eos="[SEP]" if name == "bert-uncased" else "auto"
    )
    texts = []
    for token in spec.special_tokens:
        texts += [token, f"word{token}word", f" {token}\n{token}", token[:-1], token[1:]]
    for encoder in ["hf"] if name == "bert-uncased" else ["hf", "gigatoken"]:
        promise(spec, encoder, texts)
