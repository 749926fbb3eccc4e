"""Texts over all of Unicode, and encoders on them."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import strategies as st
from support.tokenizer_kinds import SPLITS, variant_of

from olm_data.encoders import Encoded, make_encoder
from olm_data.encoders.base import concatenate
from olm_data.tokenizer.tokenizer import TokenizerSpec, spec_from_bytes

NAMES = ["hf", "gigatoken"]


POINTS = st.one_of(
    st.integers(0x20, 0x7E),
    st.integers(0x300, 0x36F),  # marks
    st.sampled_from([0x898, 0x89F, 0x1ACF, 0x1AE0, 0x20C1, 0x1DFA, 0x1E08F, 0x11F5A, 0x10EFD]),
    st.integers(0x1100, 0x11FF),  # jamo
    st.integers(0xAC00, 0xAC80),
    st.sampled_from([0x200D, 0xFE0F, 0x1F468, 0x1F469, 0x1F3FB, 0x1F1E6, 0x2764, 0x1FAE9]),
    st.integers(0x600, 0x1FFF),
    st.integers(0x2000, 0xD7FF),
    st.integers(0xE000, 0x3FFFF),
    st.integers(0x40000, 0x10FFFF),
)
TEXTS = st.lists(POINTS, max_size=40).map(lambda points: "".join(map(chr, points)))


def rows(encoded: Encoded) -> list[list[int]]:
    """The ids of each document."""
    ids, offsets = encoded[:2]
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


def spec_of(data: bytes) -> TokenizerSpec:
    """A small tokenizer's file, loaded with its end token."""
    ends = {"word piece": "[SEP]"}
    names = {token["content"] for token in json.loads(data)["added_tokens"]}
    return spec_from_bytes(data, name="t", eos="</s>" if "</s>" in names else ends["word piece"])


def encoded(spec: TokenizerSpec, *texts: str, special: str = "plain") -> Encoded:
    """Texts encoded by the reference."""
    encoder = make_encoder("hf", spec, special)  # type: ignore[arg-type]
    return encoder.encode(*concatenate(text.encode() for text in texts))


def variant(small: bytes, split: str, form: str | None) -> TokenizerSpec:
    """The tokenizer with another pre-tokenizer and normaliser."""
    normalizer = None if form is None else {"type": form}
    data = variant_of(small, normalizer=normalizer, pre_tokenizer=SPLITS[split])
    return spec_from_bytes(data, name=f"{split}-{form}")
