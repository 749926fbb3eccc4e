"""Row D1 of the audit: the gate finds every code point on which encoders differ, and routes it."""

from __future__ import annotations

import json
import unicodedata
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tokenizer_kinds import SPLITS, added, variant_of

from olm_data.encoders import TextEncoder, make_encoder, sweep
from olm_data.encoders.batches import concatenate
from olm_data.encoders.code_points import CodePoints, ranges_of, unsettled
from olm_data.encoders.gate import prove
from olm_data.encoders.gigatoken import GigatokenEncoder
from olm_data.encoders.hf import HfEncoder
from olm_data.encoders.parity import compare
from olm_data.encoders.routing import Router
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer, spec_from_bytes

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


@pytest.fixture(scope="module")
def small(tiny_tokenizer: Path) -> bytes:
    return tiny_tokenizer.read_bytes()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests here sweep parts of Unicode: what they prove is for no other test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@given(
    texts=st.lists(TEXTS, max_size=5),
    chosen=st.sets(st.integers(0x80, 0x10FFFF).filter(lambda p: not 0xD800 <= p < 0xE000)),
)
@example(texts=["\u0080\u07ff\u0800\uffff\U00010000\U0010ffff"], chosen={0x7FF, 0x800, 0x10FFFF})
def test_a_set_of_code_points_is_found_wherever_it_stands(
    texts: list[str], chosen: set[int]
) -> None:
    chosen |= {ord(c) for text in texts for c in text[:2] if ord(c) >= 0x80}
    found = CodePoints(ranges_of(sorted(chosen))).documents(*concatenate(t.encode() for t in texts))
    assert found.tolist() == [any(ord(c) in chosen for c in text) for text in texts]


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_text_without_unsettled_code_points_is_normal_to_the_library_and_here(form: str) -> None:
    from tokenizers import normalizers

    normalize = getattr(normalizers, form)().normalize_str
    bad = {p for a, b in unsettled(form) for p in range(a, b + 1)}  # type: ignore[arg-type]
    kept = [p for p in chain(*sweep.NEAR) if p not in bad]
    assert len(kept) > 100_000
    generator = np.random.default_rng(0)
    for order in (kept, kept[::-1], generator.permutation(kept).tolist()):
        text = "".join(map(chr, order))
        assert normalize(text) == text
        assert unicodedata.is_normalized(form, text)  # type: ignore[arg-type]


class Differs:
    """The reference, but for other ids wherever a text holds one of some code points."""

    name = "differs"

    def __init__(self, spec: TokenizerSpec, points: set[int]) -> None:
        self._inner = HfEncoder(spec, "plain")
        self._points = CodePoints(ranges_of(sorted(points)))

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, ends = self._inner.encode(data, offsets)
        ids = ids.copy()
        wrong = self._points.documents(data, offsets)
        ids[ends[1:][wrong] - 1] += 1
        return ids, ends


@pytest.mark.parametrize("points", [set(), {0x898}, {0x1ACF, 0x1AD0, 0x20C1, 0x3134F, 0xE0100}])
def test_the_sweep_finds_exactly_the_code_points_that_differ(
    small: bytes, points: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    near = [*range(0x20, 0x900), *range(0x1A00, 0x2100), 0x3134F, 0x31350, 0xE0100]
    monkeypatch.setattr(sweep, "NEAR", [near])
    monkeypatch.setattr(sweep, "FAR", [range(0x40000, 0x40100)])
    spec = spec_from_bytes(small, name="t")
    routed = sweep.differing(HfEncoder(spec, "plain"), Differs(spec, points), sweep.contexts())
    assert routed == ranges_of(sorted(points))
    run = TextEncoder(
        Differs(spec, points),
        spec,
        "plain",
        lambda: HfEncoder(spec, "plain"),
        Router(spec, routed),
    )
    texts = ["plain", *(f"a{chr(p)}b" for p in sorted(points)), "end"]
    made = run.encode(*concatenate(text.encode() for text in texts))
    assert made.by_reference == len(points)
    assert made.ids.tolist() == [i for text in texts for i in spec.encode(text)]


def test_an_encoder_that_differs_on_too_much_is_not_used(
    small: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.encoders.gate.recall_cuts", lambda *_: None)
    monkeypatch.setattr("olm_data.encoders.gate.remember_cuts", lambda *_: None)
    monkeypatch.setattr(sweep, "NEAR", [range(0x80, 0xD000)])
    monkeypatch.setattr(sweep, "FAR", ())
    monkeypatch.setattr(sweep, "MOST_ROUTED", 3_000)
    spec = spec_from_bytes(small, name="t")
    proof = prove(lambda t: Differs(t, set(range(0x80, 0xD000))), spec, "plain", concatenate([]))
    assert "100% of the texts compared" in proof.refused
    monkeypatch.setattr(sweep, "MOST_ROUTED", 31)
    monkeypatch.setattr(sweep, "NEAR", [range(0x80, 0x280)])
    proof = prove(lambda t: Differs(t, set(range(0x100, 0x120))), spec, "plain", concatenate([]))
    assert "32 code points (U+0100, U+0101, U+0102, ...)" in proof.refused


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


def variant(small: bytes, split: str, form: str | None) -> TokenizerSpec:
    normalizer = None if form is None else {"type": form}
    data = variant_of(small, normalizer=normalizer, pre_tokenizer=SPLITS[split])
    return spec_from_bytes(data, name=f"{split}-{form}")


KINDS = [
    *((split, None) for split in ("gpt2", "prefix", "llama3", "qwen", "deepseek", "o200k")),
    *(("gpt2", form) for form in ("NFC", "NFD", "NFKC", "NFKD")),
    ("qwen", "NFC"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("split", "form"), KINDS)
@settings(max_examples=400)
@given(texts=st.lists(TEXTS, min_size=8, max_size=24))
def test_ids_are_the_references_for_any_text(
    small: bytes, split: str, form: str | None, texts: list[str]
) -> None:
    """After a sweep, and with the routing, random texts over all of Unicode have the right ids."""
    spec = variant(small, split, form)
    reference, run = proved(spec)
    buffers = concatenate(text.encode() for text in texts)
    made = run.encode(*buffers)
    assert compare(reference.encode(*buffers), (made.ids, made.offsets)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "dolma2", "gpt-neox-dolma"])
@settings(max_examples=400)
@given(texts=st.lists(TEXTS, min_size=8, max_size=24))
def test_ids_are_the_references_for_published_tokenizers(
    shared_data: Path, name: str, texts: list[str]
) -> None:
    reference, run = proved(load_tokenizer(shared_data / "tokenizers" / name))
    buffers = concatenate(text.encode() for text in texts)
    made = run.encode(*buffers)
    assert compare(reference.encode(*buffers), (made.ids, made.offsets)) == ""


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
    spec = variant(small, "gpt2", form)
    reference = HfEncoder(spec, "plain")
    run = TextEncoder(
        GigatokenEncoder(spec, "plain"), spec, "plain", lambda: reference, Router(spec, ())
    )
    buffers = concatenate(text.encode() for text in texts)
    made = run.encode(*buffers)
    assert compare(reference.encode(*buffers), (made.ids, made.offsets)) == ""
    normalize = spec.reference.normalizer.normalize_str
    assert made.by_reference == sum(normalize(text) != text for text in texts)


def test_the_cuts_of_the_real_library_are_seen_whatever_the_vocabulary(
    small: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of 512 entries shows none of these; the probe's shows them all."""
    monkeypatch.setattr(sweep, "NEAR", [range(0x80, 0x100), range(0x1AC0, 0x1AF0), [0x20C1]])
    monkeypatch.setattr(sweep, "FAR", ())
    spec = variant(small, "deepseek", None)
    proof = prove(lambda t: GigatokenEncoder(t, "plain"), spec, "plain", concatenate([]))
    assert proof.refused == ""
    routed = {p for first, last in proof.routed for p in range(first, last + 1)}
    assert {0x1ACF, 0x20C1} <= routed
    assert min(routed) >= 0x1AC0


def test_what_is_proved_of_the_cuts_serves_every_vocabulary_that_is_cut_alike(
    small: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "NEAR", [range(0x80, 0x100), range(0x1AC0, 0x1AF0)])
    monkeypatch.setattr(sweep, "FAR", ())
    spec = variant(small, "qwen", None)
    first = prove(lambda t: GigatokenEncoder(t, "plain"), spec, "plain", concatenate([]))
    monkeypatch.setattr("olm_data.encoders.gate.contexts", None)  # they are not swept again
    model = json.loads(spec.json_bytes)
    del model["model"]["merges"][-1]
    other = spec_from_bytes(json.dumps(model).encode(), name="other")
    second = prove(lambda t: GigatokenEncoder(t, "plain"), other, "plain", concatenate([]))
    assert (first.refused, second) == ("", first)


@pytest.mark.parametrize("split", SPLITS)
def test_few_contexts_tell_the_kinds_of_long_blocks_apart(small: bytes, split: str) -> None:
    """A code point of a long block that is taken for one of another kind is cut otherwise there."""
    cut = variant(small, split, None).reference.pre_tokenizer.pre_tokenize_str

    def cuts(contexts: tuple[str, ...], character: str) -> list[list[tuple[int, int]]]:
        return [[span for _, span in cut(c.replace("@", character))] for c in contexts]

    of_blocks = ["\ua015", "\U0003a000", "\ue123"]  # Lo, Cn, Co
    others = "\u0391\u0301\u0661\u2160\u203f\u2212\u3000"  # Lu, Mn, Nd, Nl, Pc, Sm, Zs
    for one in of_blocks:
        for other in others:
            if cuts(sweep.MIXED_CONTEXTS, one) != cuts(sweep.MIXED_CONTEXTS, other):
                assert cuts(sweep.BLOCK_CONTEXTS, one) != cuts(sweep.BLOCK_CONTEXTS, other)
