"""What every run does around an encoder: the policy for special tokens, and the reference."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.encoding import NAMES, rows

from olm_data.encoders import TextEncoder, make_encoder
from olm_data.encoders.base import concatenate
from olm_data.encoders.hf import HfEncoder
from olm_data.errors import InputError
from olm_data.tokenizer.tokenizer import TokenizerSpec, spec_from_bytes


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_text_follow_the_policy(spec: TokenizerSpec, name: str) -> None:
    texts = ["a<|endoftext|>b<|endoftext|>", "none", "<|endoftext", "|>"]
    buffers = concatenate(text.encode() for text in texts)
    plain = make_encoder(name, spec, "plain").encode(*buffers)
    assert plain.special_hits == 2
    assert spec.eos not in plain.ids
    assert [spec.decode(row) for row in rows(plain)] == texts
    allowed = make_encoder(name, spec, "allow").encode(*buffers)
    assert rows(allowed)[0].count(spec.eos) == 2
    assert rows(allowed)[1:] == rows(plain)[1:]
    with pytest.raises(InputError, match=r"special token <\|endoftext\|>") as caught:
        make_encoder(name, spec, "error").encode(*buffers, where=lambda k: f"line {k}")
    assert "line 0" in str(caught.value)


def test_an_end_token_the_file_forgot_to_mark_special_is_plain_in_text_too(
    spec: TokenizerSpec,
) -> None:
    model = json.loads(spec.json_bytes)
    model["added_tokens"][0]["special"] = False
    other = spec_from_bytes(json.dumps(model).encode(), name="t", eos="<|endoftext|>")
    for name in NAMES:
        encoded = make_encoder(name, other, "plain").encode(*concatenate([b"a<|endoftext|>b"]))
        assert other.eos not in encoded.ids
        assert encoded.special_hits == 1


def test_what_an_encoder_makes_a_special_token_of_is_given_to_the_reference(
    spec: TokenizerSpec,
) -> None:
    class Leaky:
        name = "leaky"

        def encode(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return np.array([5, spec.eos, 7], np.uint32), np.array([0, 3])

    buffers = concatenate([b"abc"])
    made = TextEncoder(Leaky(), spec, "plain", lambda: HfEncoder(spec, "plain")).encode(*buffers)
    assert (rows(made), made.by_reference) == ([spec.encode("abc")], 1)
    assert rows(TextEncoder(Leaky(), spec, "allow").encode(*buffers)) == [[5, spec.eos, 7]]
