"""The fast encoder gives the ids of the reference for any text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.encoding import TEXTS, variant

from olm_data.encoders import TextEncoder, make_encoder
from olm_data.encoders.base import compare, concatenate
from olm_data.encoders.code_points import ReferenceRouter
from olm_data.encoders.gate import prove
from olm_data.encoders.gigatoken import GigatokenEncoder
from olm_data.encoders.hf import HfEncoder
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")


KINDS = [
    *((split, None) for split in ("gpt2", "prefix", "llama3", "qwen", "deepseek", "o200k")),
    *(("gpt2", form) for form in ("NFC", "NFD", "NFKC", "NFKD")),
    ("qwen", "NFC"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("split", "form"), KINDS)
@settings(max_examples=120)
@given(texts=st.lists(TEXTS, min_size=8, max_size=24))
def test_ids_are_the_references_for_any_text(
    small: bytes, split: str, form: str | None, texts: list[str]
) -> None:
    """After a sweep, and with the routing, random texts over all of Unicode have the right ids."""
    reference, run = proved(variants(small, split, form))
    buffers = concatenate(text.encode() for text in texts)
    made = run.encode(*buffers)
    assert compare(reference.encode(*buffers), (made.ids, made.offsets)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "dolma2", "gpt-neox-dolma"])
@settings(max_examples=120)
@given(texts=st.lists(TEXTS, min_size=8, max_size=24))
def test_ids_are_the_references_for_published_tokenizers(
    shared_data: Path, name: str, texts: list[str]
) -> None:
    reference, run = proved(published(shared_data / "tokenizers" / name))
    buffers = concatenate(text.encode() for text in texts)
    made = run.encode(*buffers)
    assert compare(reference.encode(*buffers), (made.ids, made.offsets)) == ""


# Each example asks for them again, and a published file takes half a second to read.
variants = cache(variant)
published = cache(load_tokenizer)

_PROVED: dict[str, tuple[HfEncoder, TextEncoder]] = {}


def proved(spec: TokenizerSpec) -> tuple[HfEncoder, TextEncoder]:
    """Return the reference and gigatoken with what the gate routes; proved once a tokenizer."""
    if spec.sha256 not in _PROVED:
        proof = prove(lambda t: GigatokenEncoder(t, "plain"), spec, "plain", concatenate([]))
        assert proof.refused == ""
        run = make_encoder("gigatoken", spec, "plain", proof.routed)
        _PROVED[spec.sha256] = HfEncoder(spec, "plain"), run
    return _PROVED[spec.sha256]


@settings(max_examples=25)
@given(texts=st.lists(TEXTS, max_size=12))
@example(
    texts=["a\u0898\u0301b", "e\u0301", "\u1100\u1161\u11a8", "\u212b", "\U000113c2\U000113c2"]
)
@pytest.mark.parametrize("form", ["NFC", "NFKD"])
def test_text_that_normalisation_changes_goes_to_the_reference(
    small: bytes, form: str, texts: list[str]
) -> None:
    spec = variants(small, "gpt2", form)
    reference = HfEncoder(spec, "plain")
    run = TextEncoder(
        GigatokenEncoder(spec, "plain"), spec, "plain", lambda: reference, ReferenceRouter(spec, ())
    )
    buffers = concatenate(text.encode() for text in texts)
    made = run.encode(*buffers)
    assert compare(reference.encode(*buffers), (made.ids, made.offsets)) == ""
    normalize = spec.reference.normalizer.normalize_str
    assert made.by_reference == sum(normalize(text) != text for text in texts)
