"""What is proved of an encoder before it is used, and what keeps it away."""

from __future__ import annotations

import json

import pytest
from support.encoding import variant
from support.tokenizer_kinds import added, variant_of

from olm_data.encoders import gate
from olm_data.encoders.base import concatenate
from olm_data.encoders.gate import prove
from olm_data.encoders.gigatoken import GigatokenEncoder
from olm_data.encoders.hf import HfEncoder
from olm_data.tokenizer.tokenizer import spec_from_bytes

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("kind", ["Lowercase", "Strip", "StripAccents", "Nmt", "BertNormalizer"])
def test_a_normaliser_nothing_is_proved_of_keeps_the_fast_encoder_away(
    small: bytes, kind: str
) -> None:
    options = {"Strip": {"strip_left": True, "strip_right": True}}.get(kind, {})
    if kind == "BertNormalizer":
        names = ("clean_text", "handle_chinese_chars", "lowercase", "strip_accents")
        options = dict.fromkeys(names, True)
    spec = spec_from_bytes(variant_of(small, normalizer={"type": kind, **options}), name="t")
    proof = prove(lambda t: HfEncoder(t, "plain"), spec, "plain", concatenate([]))
    assert proof.refused == f"nothing is proved with the normaliser {kind}"


def test_an_added_token_that_normalisation_changes_keeps_the_fast_encoder_away(
    small: bytes,
) -> None:
    tokens = [added("<|endoftext|>", 0), added("e\u0301", 512, special=False)]
    changed = variant_of(small, normalizer={"type": "NFC"}, added_tokens=tokens)
    spec = spec_from_bytes(changed, name="t")
    assert "NFC" in prove(lambda t: HfEncoder(t, "plain"), spec, "plain", concatenate([])).refused


def test_the_cuts_of_the_real_library_are_seen_whatever_the_vocabulary(
    small: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of 512 entries shows none of these; the probe's shows them all."""
    monkeypatch.setattr(gate, "NEAR", [range(0x80, 0x100), range(0x1AC0, 0x1AF0), [0x20C1]])
    monkeypatch.setattr(gate, "FAR", ())
    spec = variant(small, "deepseek", None)
    proof = prove(lambda t: GigatokenEncoder(t, "plain"), spec, "plain", concatenate([]))
    assert proof.refused == ""
    routed = {p for first, last in proof.routed for p in range(first, last + 1)}
    assert {0x1ACF, 0x20C1} <= routed
    assert min(routed) >= 0x1AC0


def test_what_is_proved_of_the_cuts_serves_every_vocabulary_that_is_cut_alike(
    small: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "NEAR", [range(0x80, 0x100), range(0x1AC0, 0x1AF0)])
    monkeypatch.setattr(gate, "FAR", ())
    spec = variant(small, "qwen", None)
    first = prove(lambda t: GigatokenEncoder(t, "plain"), spec, "plain", concatenate([]))
    monkeypatch.setattr("olm_data.encoders.gate.contexts", None)  # they are not swept again
    model = json.loads(spec.json_bytes)
    del model["model"]["merges"][-1]
    other = spec_from_bytes(json.dumps(model).encode(), name="other")
    second = prove(lambda t: GigatokenEncoder(t, "plain"), other, "plain", concatenate([]))
    assert (first.refused, second) == ("", first)
