"""Row 20: a megabyte of one character ends, with the right ids; a panic is an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from olm_data.encoders import make_encoder
from olm_data.encoders.base import Unencodable, concatenate
from olm_data.encoders.hf import HfEncoder
from olm_data.tokenizer.tokenizer import load_tokenizer


@pytest.mark.parametrize("character", ["a", " ", "\n", "1", "!", "\u0301"])
def test_a_megabyte_of_one_character_encodes_and_decodes_back(
    tiny_tokenizer: Path, character: str
) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    text = character * (1_000_000 // len(character.encode()))
    buffers = concatenate([text.encode()])
    one, other = (
        make_encoder(name, spec, "plain").encode(*buffers) for name in ("hf", "gigatoken")
    )
    assert np.array_equal(one.ids, other.ids)
    assert spec.decode(one.ids) == text


def test_a_panic_of_the_library_is_a_document_that_cannot_be_encoded(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """What a Rust panic is in Python: no `Exception`."""

    class Panicking:
        pre_tokenizer = None

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            raise PanicException("index out of bounds")

    encoder = HfEncoder(load_tokenizer(tiny_tokenizer), "plain")
    monkeypatch.setattr(encoder, "_tokenizer", Panicking())
    with pytest.raises(Unencodable, match="index out of bounds"):
        encoder.encode(*concatenate([b"text"]))


def test_an_interrupt_is_not_taken_for_a_panic(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        pre_tokenizer = None

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            raise KeyboardInterrupt

    encoder = HfEncoder(load_tokenizer(tiny_tokenizer), "plain")
    monkeypatch.setattr(encoder, "_tokenizer", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(*concatenate([b"text"]))
