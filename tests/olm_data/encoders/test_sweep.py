"""The sweep finds the code points on which an encoder differs."""

from __future__ import annotations

import numpy as np
import pytest
from support.encoding import variant
from support.tokenizer_kinds import SPLITS

from olm_data.counts import stretches
from olm_data.encoders import TextEncoder, gate
from olm_data.encoders.base import concatenate
from olm_data.encoders.code_points import CodePoints, ReferenceRouter
from olm_data.encoders.gate import prove
from olm_data.encoders.hf import HfEncoder
from olm_data.tokenizer.tokenizer import TokenizerSpec, spec_from_bytes

pytestmark = pytest.mark.usefixtures("own_cache")


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
