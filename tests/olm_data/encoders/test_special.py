"""Strings in text that spell a special token: found wherever they lie."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.encoders.base import SCAN_BYTES, Scanner, concatenate


@given(
    texts=st.lists(st.text("<|eos>a", max_size=12), max_size=6),
    tokens=st.sets(st.sampled_from(["<|e|>", "<|eos|>", "<s>", "<|", "<|e|><|"]), min_size=1),
)
def test_hits_are_what_searching_each_document_finds(texts: list[str], tokens: set[str]) -> None:
    found = Scanner(tokens).hits(*concatenate(text.encode() for text in texts))
    by_prefix: dict[str, list[str]] = {}
    for token in tokens:
        by_prefix.setdefault(token[:2], []).append(token)
    wanted = []
    for group in by_prefix.values():
        pattern = "|".join(re.escape(t) for t in sorted(group, key=len, reverse=True))
        for k, text in enumerate(texts):
            wanted += [(k, hit) for hit in re.findall(pattern, text)]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    "place", [0, 1, SCAN_BYTES - 2, SCAN_BYTES - 1, SCAN_BYTES, 3 * SCAN_BYTES]
)
@pytest.mark.parametrize("token", ["<|x|>", "\u00a0", "~"])
def test_a_special_token_is_found_wherever_it_lies(token: str, place: int) -> None:
    text = b"<" * place + token.encode() + b"|" * (2 * SCAN_BYTES - 1)
    assert Scanner([token]).hits(*concatenate([text])) == [(0, token)]
