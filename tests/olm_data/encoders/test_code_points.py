"""Row D1 of the audit: the gate finds every code point on which encoders differ, and routes it."""

from __future__ import annotations

import unicodedata
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.encoding import TEXTS

from olm_data.counts import stretches
from olm_data.encoders import gate
from olm_data.encoders.base import concatenate
from olm_data.encoders.code_points import CodePoints, unsettled


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
