"""A corpus is a value: cut by its inputs alone, sent to processes, known by a digest."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
from support.texts import given, write_texts

from olm_data.errors import InputError, UsageError
from olm_data.extensions.text_stream import documents as module
from olm_data.extensions.text_stream.documents import ReadingOrder, Slot, local_corpus
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer


def test_a_large_file_is_cut_into_units_that_hold_all_of_it(
    tmp_path: Path, spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path, [60])
    monkeypatch.setattr(module, "LEAST_UNIT", 200)
    monkeypatch.setattr(module, "UNITS", 1 << 40)
    corpus = local_corpus(tmp_path, spec)
    assert len(corpus.units) > 5
    assert given(corpus, Slot(), ReadingOrder()) == texts
    dealt = [given(corpus, Slot(n, 2), ReadingOrder()) for n in range(2)]
    assert sorted(dealt[0] + dealt[1]) == sorted(texts)


def test_it_is_the_same_in_another_process(tmp_path: Path, spec: TokenizerSpec) -> None:
    texts = write_texts(tmp_path, [3])
    corpus = local_corpus(tmp_path, spec)
    assert given(corpus, Slot(), ReadingOrder()) == texts  # its encoder is made
    again = pickle.loads(pickle.dumps(corpus))
    assert again == corpus
    assert given(again, Slot(), ReadingOrder()) == texts


def test_the_digest_tells_whether_other_tokens_would_come(
    tmp_path: Path, spec: TokenizerSpec, tiny_tokenizer: Path
) -> None:
    write_texts(tmp_path / "a", [3, 4])
    digest = local_corpus(tmp_path / "a", spec).digest
    shutil.copytree(tmp_path / "a", tmp_path / "copy" / "a")
    assert local_corpus(tmp_path / "copy" / "a", spec).digest == digest
    other = load_tokenizer(tiny_tokenizer, eos="none")
    assert local_corpus(tmp_path / "a", other).digest != digest
    with (tmp_path / "a" / "part-001.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert local_corpus(tmp_path / "a", spec).digest != digest


def test_the_encoder_asked_for_is_proved_and_gives_the_same(
    tmp_path: Path, spec: TokenizerSpec
) -> None:
    texts = write_texts(tmp_path, [20])
    fast = local_corpus(tmp_path, spec, encoder="gigatoken")
    assert fast.encoder == "gigatoken"
    assert given(fast, Slot(), ReadingOrder()) == texts
    with pytest.raises(UsageError, match="no encoder"):
        local_corpus(tmp_path, spec, encoder="quickest")


def test_files_without_a_byte_are_no_text(tmp_path: Path, spec: TokenizerSpec) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(InputError):
        local_corpus(tmp_path, spec)
