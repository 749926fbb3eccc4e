"""What is proved of a fast encoder before it is used, kept, routed; and that it gives equal ids."""

from __future__ import annotations

import json
import os
import unicodedata
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.encoding import TEXTS, variant
from support.tokenizer_kinds import SPLITS, added, variant_of

from olm_data.counts import stretches
from olm_data.encoders import (
    SMALL_TEXT,
    TextEncoder,
    choose_encoder,
    gate,
    known_encoder,
    make_encoder,
)
from olm_data.encoders.base import compare, concatenate
from olm_data.encoders.code_points import (
    CodePoints,
    Proof,
    ReferenceRouter,
    recall,
    remember,
    unsettled,
)
from olm_data.encoders.gate import SAMPLE_BYTES, prove, sample_of
from olm_data.encoders.gigatoken import GigatokenEncoder
from olm_data.encoders.hf import HfEncoder
from olm_data.errors import ValidationError
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer, spec_from_bytes

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


def test_a_first_document_longer_than_the_sample_does_not_leave_it_empty() -> None:
    rows = [b"x" * (SAMPLE_BYTES + 1), b"one", b"two", b"y" * (SAMPLE_BYTES - 5), b"three"]
    data, offsets = sample_of(*concatenate(rows))
    assert data.tobytes() == b"onetwothree"
    assert offsets.tolist() == [0, 3, 6, 11]


def test_the_sample_is_bounded() -> None:
    data, offsets = sample_of(*concatenate([b"a" * 1000] * 1000))
    assert SAMPLE_BYTES - 1000 < len(data) <= SAMPLE_BYTES
    assert np.all(np.diff(offsets) == 1000)


@given(
    texts=st.lists(TEXTS, max_size=5),
    chosen=st.sets(st.integers(0x80, 0x10FFFF).filter(lambda p: not 0xD800 <= p < 0xE000)),
)
@example(texts=["\u0080\u07ff\u0800\uffff\U00010000\U0010ffff"], chosen={0x7FF, 0x800, 0x10FFFF})
def test_a_set_of_code_points_is_found_wherever_it_stands(
    texts: list[str], chosen: set[int]
) -> None:
    chosen |= {ord(c) for text in texts for c in text[:2] if ord(c) >= 0x80}
    found = CodePoints(stretches(sorted(chosen))).documents(*concatenate(t.encode() for t in texts))
    assert found.tolist() == [any(ord(c) in chosen for c in text) for text in texts]


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_text_without_unsettled_code_points_is_normal_to_the_library_and_here(form: str) -> None:
    from tokenizers import normalizers

    normalize = getattr(normalizers, form)().normalize_str
    bad = {p for a, b in unsettled(form) for p in range(a, b + 1)}  # type: ignore[arg-type]
    kept = [p for p in chain(*gate.NEAR) if p not in bad]
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
        self._points = CodePoints(stretches(sorted(points)))

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
    monkeypatch.setattr(gate, "NEAR", [near])
    monkeypatch.setattr(gate, "FAR", [range(0x40000, 0x40100)])
    spec = spec_from_bytes(small, name="t")
    routed = gate.differing(HfEncoder(spec, "plain"), Differs(spec, points), gate.contexts())
    assert routed == stretches(sorted(points))
    run = TextEncoder(
        Differs(spec, points),
        spec,
        "plain",
        lambda: HfEncoder(spec, "plain"),
        ReferenceRouter(spec, routed),
    )
    texts = ["plain", *(f"a{chr(p)}b" for p in sorted(points)), "end"]
    made = run.encode(*concatenate(text.encode() for text in texts))
    assert made.by_reference == len(points)
    assert made.ids.tolist() == [i for text in texts for i in spec.encode(text)]


def test_an_encoder_that_differs_on_too_much_is_not_used(
    small: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.encoders.gate.recall", lambda *_: None)
    monkeypatch.setattr("olm_data.encoders.gate.remember", lambda *_: None)
    monkeypatch.setattr(gate, "NEAR", [range(0x80, 0xD000)])
    monkeypatch.setattr(gate, "FAR", ())
    monkeypatch.setattr(gate, "MOST_ROUTED", 3_000)
    spec = spec_from_bytes(small, name="t")
    proof = prove(lambda t: Differs(t, set(range(0x80, 0xD000))), spec, "plain", concatenate([]))
    assert "100% of the texts compared" in proof.refused
    monkeypatch.setattr(gate, "MOST_ROUTED", 31)
    monkeypatch.setattr(gate, "NEAR", [range(0x80, 0x280)])
    proof = prove(lambda t: Differs(t, set(range(0x100, 0x120))), spec, "plain", concatenate([]))
    assert "32 code points (U+0100, U+0101, U+0102, ...)" in proof.refused


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
            if cuts(gate.MIXED_CONTEXTS, one) != cuts(gate.MIXED_CONTEXTS, other):
                assert cuts(gate.BLOCK_CONTEXTS, one) != cuts(gate.BLOCK_CONTEXTS, other)


PROOF = Proof(routed=((0x898, 0x89F), (0x1ACF, 0x1ACF)))


def only_file(cache: Path) -> Path:
    (path,) = (path for path in cache.rglob("*") if path.is_file())
    return path


def test_what_is_remembered_is_recalled_for_the_same_case_only(
    spec: TokenizerSpec, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(PROOF, "gigatoken", spec, "plain")
    assert only_file(own_cache).parent == own_cache / "olm" / "encoders"
    assert recall("gigatoken", spec, "plain") == recall("gigatoken", spec, "error") == PROOF
    assert recall("gigatoken", spec, "allow") is None
    other = spec_from_bytes(spec.json_bytes + b" ", name="t")
    assert recall("gigatoken", other, "plain") is None
    for name, value in (("GATE", 0), ("version", lambda package: "9.9"), ("unidata_version", "99")):
        with monkeypatch.context() as changed:
            changed.setattr(f"olm_data.encoders.code_points.{name}", value)
            assert recall("gigatoken", spec, "plain") is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"refused": "", "routed": [], "sha256": ""}',
        b" " * (1 << 20),
        "flip",
        "widen",
    ],
)
def test_a_damaged_or_forged_proof_is_none(
    spec: TokenizerSpec, own_cache: Path, damage: bytes | str
) -> None:
    remember(PROOF, "gigatoken", spec, "plain")
    path = only_file(own_cache)
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        stored = json.loads(path.read_bytes())
        stored["routed"] = [[0x41, 0x42]] if damage == "widen" else stored["routed"][:1]
        path.write_text(json.dumps(stored))
    assert recall("gigatoken", spec, "plain") is None
    remember(PROOF, "gigatoken", spec, "plain")
    assert recall("gigatoken", spec, "plain") == PROOF


def test_a_proof_others_can_write_or_that_is_no_file_is_none(
    spec: TokenizerSpec, own_cache: Path
) -> None:
    remember(PROOF, "gigatoken", spec, "plain")
    path = only_file(own_cache)
    path.chmod(0o666)
    assert recall("gigatoken", spec, "plain") is None
    path.chmod(0o600)
    moved = path.rename(own_cache / "elsewhere")
    path.symlink_to(moved)
    assert recall("gigatoken", spec, "plain") is None
    path.unlink()
    os.mkfifo(path)
    assert recall("gigatoken", spec, "plain") is None


def test_a_cache_that_cannot_be_written_is_no_error(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    remember(PROOF, "gigatoken", spec, "plain")
    assert recall("gigatoken", spec, "plain") is None


@pytest.mark.parametrize("refused", ["", "it differs on 5,000 code points"])
def test_the_second_run_compares_nothing_and_says_the_same(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr(gate, "NEAR", [range(0x20, 0x300)])
    monkeypatch.setattr(gate, "FAR", ())
    if refused:
        monkeypatch.setattr("olm_data.encoders.gate.prove", lambda *_: Proof(refused=refused))
    assert known_encoder("auto", spec, "plain", SMALL_TEXT) is None
    first = choose_encoder("auto", spec, "plain", concatenate([b"text"]))
    monkeypatch.setattr("olm_data.encoders.choose_encoder", None)
    monkeypatch.setattr(HfEncoder, "encode", None)
    assert known_encoder("auto", spec, "plain", SMALL_TEXT) == first
    if refused:
        assert first.encoder == "hf"
        assert "proved" not in first.claim
        assert f"gigatoken is not used with this tokenizer, as {refused}" in first.note
        with pytest.raises(ValidationError, match="other ids") as caught:
            known_encoder("gigatoken", spec, "plain", 0)
        assert caught.value.why == refused
    else:
        assert first.encoder == "gigatoken"
        assert first.claim.startswith(
            "the ids of hf, proved on every code point (in 9 contexts; 3 in"
        )


def test_little_text_is_encoded_by_the_reference_before_a_proof_would_be_done(
    spec: TokenizerSpec,
) -> None:
    report = known_encoder("auto", spec, "plain", SMALL_TEXT - 1)
    assert (report.encoder, report.claim) == ("hf", "the reference, as there is little text")
    assert known_encoder("gigatoken", spec, "plain", SMALL_TEXT - 1) is None


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
