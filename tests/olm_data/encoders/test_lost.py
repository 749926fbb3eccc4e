"""Characters that a BPE model leaves out in silence are counted."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from support.encoding import encoded, spec_of
from support.tokenizer_kinds import bpe

from olm_data.encoders.base import lost_characters
from olm_data.tokenizer.tokenizer import TokenizerSpec


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
