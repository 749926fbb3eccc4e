"""Buffers of documents are taken apart and put together as lists of their rows are."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.encoding import encoded, spec_of
from support.tokenizer_kinds import bpe

from olm_data.encoders.base import (
    SCAN_BYTES,
    Ids,
    Scanner,
    chosen_of,
    concatenate,
    count_ids,
    ids_of,
    lost_characters,
    merged,
)
from olm_data.tokenizer.tokenizer import TokenizerSpec

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8)


def buffers(rows: list[list[int]]) -> Ids:
    ids = np.array([i for row in rows for i in row], np.uint32)
    return ids, np.cumsum([0, *map(len, rows)])


def rows_of(made: Ids) -> list[list[int]]:
    return [ids_of(made, k).tolist() for k in range(len(made[1]) - 1)]


@given(ROWS, st.data())
def test_a_batch_that_is_parted_is_whole_again_when_it_is_merged(
    rows: list[list[int]], data: st.DataObject
) -> None:
    flags = st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))
    chosen = np.array(data.draw(flags), dtype=bool)
    made = buffers(rows)
    one, other = chosen_of(made, chosen), chosen_of(made, ~chosen)
    assert rows_of(one) == [row for row, taken in zip(rows, chosen, strict=True) if taken]
    assert rows_of(merged(chosen, one, other)) == rows


@given(ROWS, st.sets(st.integers(0, 9)))
def test_ids_are_counted_document_by_document(rows: list[list[int]], wanted: set[int]) -> None:
    counts = count_ids(buffers(rows), np.array(sorted(wanted), np.uint32))
    assert counts.tolist() == [sum(i in wanted for i in row) for row in rows]


@given(st.lists(st.binary(max_size=5)))
def test_documents_are_one_after_another_in_their_buffer(texts: list[bytes]) -> None:
    data, offsets = concatenate(texts)
    assert data.tobytes() == b"".join(texts)
    assert offsets.tolist() == np.cumsum([0, *map(len, texts)]).tolist()


# Strings in text that spell a special token: found wherever they lie.
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


# Characters that a BPE model leaves out in silence are counted.
def lost(text: str, spec: TokenizerSpec) -> int:
    return int(encoded(spec, text).unknown[0])


def test_characters_that_a_bpe_without_unknown_token_leaves_out_are_counted() -> None:
    spec = spec_of(bpe(unk=False))
    assert lost("the cat", spec) == 0
    assert lost("the \u6f22 cat \u6f22\U0001f642", spec) == 3
    some = json.loads(bpe(unk=False, byte_fallback=True, all_bytes=False))
    assert lost("\u6f22", spec_of(json.dumps(some).encode())) == 1  # one of its bytes is missing
    whole = spec_of(bpe(unk=False, byte_fallback=True))
    assert lost("\u6f22\U0001f642", whole) == 0


@given(st.text(max_size=30))
@settings(max_examples=60)
def test_as_many_are_counted_as_the_library_leaves_out(text: str) -> None:
    """Without merges a token is a letter: what has no token was left out."""
    spec = spec_of(bpe(unk=False, merges=False))
    text = text.encode(errors="replace").decode()
    normal = spec.reference.normalizer.normalize_str(text)
    made = encoded(spec, text)
    if "<" not in text:  # a spelled special is encoded in pieces
        assert len(normal) - len(made.ids) == made.unknown[0]


def test_a_byte_level_vocabulary_with_a_hole_counts_what_falls_through_it() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def made(vocabulary: dict[str, int]) -> TokenizerSpec:
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = split
        tokenizer.add_special_tokens(["</s>"])
        return spec_of(tokenizer.to_str().encode())

    assert lost_characters(made(vocabulary)) is None
    hole = split.pre_tokenize_str("e")[0][0]
    holed = made({letter: n for letter, n in vocabulary.items() if letter != hole})
    assert lost("the sea", holed) == 2
