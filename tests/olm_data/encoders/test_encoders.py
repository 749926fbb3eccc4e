"""Encoders: buffers in, buffers out, and one rule for special tokens whichever library works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.encoding import NAMES, rows

from olm_data.encoders import choose_encoder, gate, make_encoder
from olm_data.encoders.base import concatenate
from olm_data.errors import UsageError
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer, spec_from_bytes


@pytest.mark.parametrize("name", NAMES)
def test_each_document_gets_the_ids_of_the_reference_library(
    spec: TokenizerSpec, name: str
) -> None:
    texts = ["hello world", "", "caf\u00e9\r\n", " " * 50, "x" * 3000, "\x00", "\U0001f600"]
    encoded = make_encoder(name, spec, "plain").encode(*concatenate(t.encode() for t in texts))
    assert (encoded.ids.dtype, encoded.offsets.dtype) == (np.uint32, np.int64)
    assert encoded.offsets[0] == 0
    assert rows(encoded) == [spec.encode(text) for text in texts]


@pytest.mark.parametrize("name", NAMES)
def test_no_documents_give_no_ids(spec: TokenizerSpec, name: str) -> None:
    encoded = make_encoder(name, spec, "plain").encode(*concatenate([]))
    assert (len(encoded.ids), encoded.offsets.tolist(), encoded.special_hits) == (0, [0], 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_equals_its_documents_one_by_one(spec: TokenizerSpec, name: str) -> None:
    encoder = make_encoder(name, spec, "plain")
    texts = [f"text {k} ".encode() * k for k in range(40)]
    together = rows(encoder.encode(*concatenate(texts)))
    assert together == [rows(encoder.encode(*concatenate([t])))[0] for t in texts]


@settings(max_examples=50)
@given(texts=st.lists(st.text(max_size=200), max_size=8))
def test_both_encoders_agree_on_any_text_and_it_decodes_back(
    spec: TokenizerSpec, texts: list[str]
) -> None:
    buffers = concatenate(text.encode() for text in texts)
    one, other = (make_encoder(name, spec, "plain").encode(*buffers) for name in NAMES)
    assert rows(one) == rows(other)
    assert [spec.decode(row) for row in rows(one)] == texts


def test_auto_takes_the_fast_encoder_after_comparing_it(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gate, "NEAR", [range(0x20, 0x3000)])
    monkeypatch.setattr(gate, "FAR", ())
    report = choose_encoder("auto", spec, "plain", concatenate([b"some text"] * 50))
    assert report.encoder == "gigatoken"
    assert "every code point" in report.claim
    assert report.note == ""


def test_auto_without_the_fast_library_says_so(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.encoders.find_spec", lambda name: None)
    report = choose_encoder("auto", spec, "plain", concatenate([]))
    assert report.encoder == "hf"
    assert "pip install 'olm-data[fast]'" in report.note
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(UsageError, match=r"olm-data\[fast\]"):
        choose_encoder("gigatoken", spec, "plain", concatenate([]))


def test_a_tokenizer_the_fast_library_cannot_load_falls_back_and_says_so(
    spec: TokenizerSpec,
) -> None:
    model = json.loads(spec.json_bytes)
    vocab = {token: k for k, token in enumerate(["<|endoftext|>", "[UNK]", "a", "##b"])}
    model |= {
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": None,
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }
    other = spec_from_bytes(json.dumps(model).encode(), name="pieces")
    report = choose_encoder("auto", other, "plain", concatenate([]))
    assert report.encoder == "hf"
    assert "cannot load the tokenizer pieces" in report.note
    with pytest.raises(UsageError, match="cannot load"):
        choose_encoder("gigatoken", other, "plain", concatenate([]))
    # The unknown token is a special token of many files, and what text may become all the same.
    encoded = make_encoder("hf", other, "plain").encode(*concatenate([b"ab zzz"]))
    assert encoded.ids.tolist() == [2, 3, 1]


def test_an_encoder_that_does_not_exist_is_refused(spec: TokenizerSpec) -> None:
    with pytest.raises(UsageError, match="did you mean 'gigatoken'"):
        choose_encoder("gigatokens", spec, "plain", concatenate([]))


def test_no_encoder_library_is_imported_before_an_encoder_is_made() -> None:
    code = (
        "import olm_data.encoders, olm_data.tokenizer.tokenizer, sys;"
        "print([m for m in ('tokenizers', 'gigatoken', 'awkward', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "dolma2", "gpt-neox-dolma"])
@pytest.mark.parametrize("special", ["plain", "allow"])
def test_the_gate_passes_for_real_tokenizers(shared_data: Path, name: str, special: str) -> None:
    spec = load_tokenizer(shared_data / "tokenizers" / name)
    text = (shared_data / "corpora/books-novels/tinyshakespeare.txt").read_bytes()[:100_000]
    report = choose_encoder("auto", spec, special, concatenate([text]))  # type: ignore[arg-type]
    assert (report.encoder, report.note) == ("gigatoken", "")
