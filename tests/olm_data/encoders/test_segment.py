"""Long documents: pieces encode to the ids of the whole, in memory that stays bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import WITH_TESTS, environment

from olm_data.encoders import hf, make_encoder
from olm_data.encoders.base import concatenate
from olm_data.encoders.hf import pieces
from olm_data.tokenizer.tokenizer import TokenizerSpec, spec_from_bytes


def variant(spec: TokenizerSpec, **changes: Any) -> TokenizerSpec:
    return spec_from_bytes(
        json.dumps({**json.loads(spec.json_bytes), **changes}).encode(), name="t"
    )


def text_of(size: int) -> bytes:
    words = (
        "the cat\u00e9 sat 12345 on\n\nthe  mat \u4f60\u597d, isn't it? def f(x):\n    return x\n"
    )
    return (words * (size // len(words.encode()) + 1)).encode()[: size // 2 * 2].rpartition(b" ")[0]


@settings(max_examples=60)
@given(text=st.text("ab \n\t1,\u00e9\u0301", max_size=400), target=st.integers(8, 60))
def test_pieces_join_to_the_text_and_their_ids_to_its_ids(
    spec: TokenizerSpec, text: str, target: int
) -> None:
    data = text.encode()
    cut = list(pieces(memoryview(data), spec.encode, target))
    assert b"".join(cut) == data
    ids = [i for piece in cut for i in spec.encode(piece.decode())]
    assert ids == spec.encode(text)


def test_long_text_is_cut_near_the_target(spec: TokenizerSpec) -> None:
    data = text_of(200_000)
    cut = list(pieces(memoryview(data), spec.encode, 10_000))
    assert len(cut) > 15
    assert max(map(len, cut)) < 12_000


def test_text_without_a_safe_place_stays_whole(spec: TokenizerSpec) -> None:
    assert list(pieces(memoryview(b"a" * 5000), spec.encode, 100)) == [b"a" * 5000]


def test_a_tokenizer_that_sees_the_start_of_its_input_is_never_cut_wrongly(
    spec: TokenizerSpec,
) -> None:
    prefixed = variant(
        spec,
        pre_tokenizer={
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": False,
        },
    )
    text = "some words in a row " * 40
    ids = [
        i
        for piece in pieces(memoryview(text.encode()), prefixed.encode, 64)
        for i in prefixed.encode(piece.decode())
    ]
    assert ids == prefixed.encode(text)


@pytest.mark.parametrize("name", ["hf", "gigatoken"])
def test_a_document_longer_than_the_target_has_the_ids_of_the_whole(
    spec: TokenizerSpec, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "TARGET_BYTES", 5_000)
    texts = [b"short", text_of(60_000), b"", text_of(4_000), text_of(6_000), b"end"]
    ids, offsets = make_encoder(name, spec, "plain").encode(*concatenate(texts))[:2]
    for k, text in enumerate(texts):
        assert ids[offsets[k] : offsets[k + 1]].tolist() == spec.encode(text.decode())


def test_a_tokenizer_without_pre_tokenizer_encodes_documents_whole(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "TARGET_BYTES", 100)
    bare = variant(spec, pre_tokenizer=None, decoder=None)
    text = "ab cd " * 200
    ids = make_encoder("hf", bare, "plain").encode(*concatenate([text.encode()])).ids
    assert ids.tolist() == bare.encode(text)


@pytest.mark.slow
def test_a_long_document_takes_bounded_memory(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text_of(5_000_000))
    script = f"""
import numpy as np
from support.memory import peak
from olm_data.encoders import make_encoder
from olm_data.tokenizer.tokenizer import load_tokenizer
data = np.fromfile({str(tmp_path / "a.txt")!r}, np.uint8)
encoder = make_encoder("hf", load_tokenizer({str(tiny_tokenizer)!r}), "plain")
encoder.encode(data[:1 << 20], np.array([0, 1 << 20]))
before = peak()
ids = encoder.encode(data, np.array([0, len(data)])).ids
print(peak() - before, len(ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(WITH_TESTS),
        capture_output=True,
        text=True,
        check=True,
    )
    grown, tokens = map(int, done.stdout.split())
    assert tokens > 500_000
    # The ids themselves, twice (pieces and their join), and room for what a piece needs; the
    # library alone would want about 100 bytes a token.
    assert grown * 1024 < tokens * 8 + (48 << 20) < tokens * 100
