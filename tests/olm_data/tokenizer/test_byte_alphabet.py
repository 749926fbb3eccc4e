"""The characters of byte-level tokenizers: those of the library, one for each byte."""

from __future__ import annotations

from tokenizers.pre_tokenizers import ByteLevel

from olm_data.tokenizer.byte_alphabet import byte_alphabet


def test_each_byte_has_the_character_of_the_library() -> None:
    found = byte_alphabet()
    assert (sorted(found.values()), set(found)) == (list(range(256)), set(ByteLevel.alphabet()))
    split = ByteLevel(add_prefix_space=False, use_regex=False)
    text = "aé 🙂\n\x00"
    ((spelled, _),) = split.pre_tokenize_str(text)
    assert bytes(found[c] for c in spelled) == text.encode()
