"""Row 18: NUL and control characters are kept exactly in tokens, and escaped in messages."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reading import read_source

from olm_data.encoders import make_encoder
from olm_data.encoders.base import concatenate
from olm_data.errors import InputError
from olm_data.tokenizer.tokenizer import load_tokenizer

CONTROL = "".join(
    map(chr, [*range(0x20), 0x7F, *range(0x80, 0xA0), 0x200B, 0x2028, 0xFEFF, 0xFFFD])
)


def through(texts: list[str], tokenizer: Path, encoder: str) -> list[str]:
    spec = load_tokenizer(tokenizer)
    made = make_encoder(encoder, spec, "plain").encode(*concatenate(t.encode() for t in texts))
    ids, offsets = made.ids, made.offsets
    return [spec.decode(ids[offsets[k] : offsets[k + 1]]) for k in range(len(texts))]


@pytest.mark.parametrize("encoder", ["hf", "gigatoken"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
def test_control_characters_come_back_from_tokens_as_they_were(
    tmp_path: Path, tiny_tokenizer: Path, name: str, encoder: str
) -> None:
    text = f"x{CONTROL}y\x00z"
    if name == "a.jsonl":
        (tmp_path / name).write_text(json.dumps({"text": text}))
    elif name == "a.parquet":
        pq.write_table(pa.table({"text": [text]}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(text.encode())
    read = read_source(tmp_path / name)
    assert read.texts == [text]
    assert through(read.texts, tiny_tokenizer, encoder) == [text]


@settings(max_examples=40)
@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_any_text_comes_back_from_its_tokens(tiny_tokenizer: Path, texts: list[str]) -> None:
    assert through(texts, tiny_tokenizer, "hf") == texts


def test_control_characters_of_the_data_cannot_forge_a_message(tmp_path: Path) -> None:
    forged = "\x1b[2J\nerror: all is well\r"
    (tmp_path / "a.jsonl").write_text(json.dumps({forged: "x"}))
    with pytest.raises(InputError) as caught:
        read_source(tmp_path / "a.jsonl")
    assert "\\x1b[2J\\nerror" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert "\r" not in str(caught.value)
    pq.write_table(pa.table({forged: ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError) as caught:
        read_source(tmp_path / "a.parquet")
    assert "\x1b" not in str(caught.value)
