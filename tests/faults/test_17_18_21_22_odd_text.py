"""FAULTS rows 17, 18, 21, 22: bad UTF-8, control characters, empty documents, special tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import olm_data
from support.inputs import write_rows
from support.reading import read_source
from support.tokenizing import digests, make_dataset, texts, tokenized, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.encoders import make_encoder
from olm_data.encoders.base import concatenate, special_ids
from olm_data.errors import ConflictError, InputError
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer

# Stray continuation, overlong forms, surrogates, beyond Unicode, cut characters, Latin-1, UTF-16.
BAD = [
    b"\x80",
    b"a\xbfb",
    b"\xc0\xaf",
    b"\xe0\x80\xaf",
    b"\xf0\x80\x80\xaf",
    b"\xed\xa0\x80",
    b"\xed\xb0\x80\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xf8\x88\x80\x80\x80",
    b"\xff",
    b"cut \xe2\x82",
    "Latin-1: \u00e9".encode("latin-1"),
    "UTF-16".encode("utf-16"),
]


def as_jsonl(path: Path, texts: list[bytes]) -> None:
    path.write_bytes(b"".join(b'{"text": "%b"}\n' % t for t in texts))


def as_parquet(path: Path, texts: list[bytes]) -> None:
    pq.write_table(pa.table({"text": pa.array(texts, pa.binary())}), path)


def as_parquet_strings(path: Path, texts: list[bytes]) -> None:
    # A file that claims to hold UTF-8: built from the buffers, as no writer would refuse it.
    raw = pa.array(texts, pa.binary())
    pq.write_table(
        pa.table({"text": pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())}), path
    )


def as_arrow(path: Path, texts: list[bytes]) -> None:
    raw = pa.array(texts, pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "a.jsonl": as_jsonl,
    "b.parquet": as_parquet,
    "c.parquet": as_parquet_strings,
    "d.arrow": as_arrow,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_17_bad_bytes_cost_their_document_only(tmp_path: Path, name: str, bad: bytes) -> None:
    bad = bad.replace(b"\x00", b"") if name == "a.jsonl" else bad
    WRITERS[name](tmp_path / name, [b"before", bad, "\u00e9 after".encode()])
    read = read_source(tmp_path / name)
    assert read.texts == ["before", "\u00e9 after"]
    (drop,) = read.drops
    assert drop.reason == "invalid_utf8"
    assert drop.position in (1, 19)  # the row, or the byte its line begins at
    assert drop.detail


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_17_bad_bytes_in_a_text_file_drop_the_file_or_the_piece(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(b"before\n\n" + bad + b"\n\nafter\n")
    whole = read_source(tmp_path / "a.txt")
    assert (whole.texts, whole.reasons) == ([], [("invalid_utf8", 0)])
    split = read_source(tmp_path / "a.txt", separator="blank-lines")
    assert split.texts == ["before", "after"]
    assert [reason for reason, _ in split.reasons] == ["invalid_utf8"]


def test_17_lone_surrogates_written_as_escapes_are_bad_text(tmp_path: Path) -> None:
    lines = [r'{"text": "\ud800"}', r'{"text": "\udc00\ud800"}', r'{"text": "\ud83d\ude00"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    read = read_source(tmp_path / "a.jsonl")
    assert read.texts == ["\U0001f600"]
    assert [reason for reason, _ in read.reasons] == ["invalid_utf8"] * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_17_a_byte_order_mark_before_the_first_document_is_no_text(
    tmp_path: Path, name: str
) -> None:
    body = json.dumps({"text": "x"}) if name == "a.jsonl" else "x"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + body.encode())
    assert read_source(tmp_path / name).texts == ["x"]


@settings(max_examples=60)
@given(texts=st.lists(st.binary(max_size=20), min_size=1, max_size=10))
def test_17_any_bytes_in_a_column_are_documents_or_counted_drops(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.parquet"
    as_parquet(path, texts)
    read = read_source(path)
    good, bad = [], []
    for k, text in enumerate(texts):
        try:
            value = text.decode()
        except UnicodeDecodeError:
            bad.append(("invalid_utf8", k))
        else:
            if value and not value.isspace():
                good.append(value)
            else:
                bad.append(("empty", k))
    assert read.texts == good
    assert read.reasons == bad


LATIN = b"caf\xe9 \xc0\xaf \xed\xa0\x80 end"  # Latin-1, an overlong form, a surrogate


MENDED = LATIN.decode(errors="replace")


def in_jsonl(folder: Path) -> Path:
    lines = [b'{"text": "one"}', b'{"text": "%b"}' % LATIN, b'{"text": "\\ud800 \\udc00x"}']
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    return folder / "a.jsonl"


def in_parquet(folder: Path) -> Path:
    column = pa.array([b"one", LATIN, b"\xed\xa0\x80 \xed\xb0\x80x"], pa.binary())
    pq.write_table(pa.table({"text": column}), folder / "a.parquet")
    return folder / "a.parquet"


@pytest.mark.parametrize("make", [in_jsonl, in_parquet])
def test_17_replace_keeps_the_document_with_a_mark_for_what_cannot_be_decoded(
    make: Any, tmp_path: Path
) -> None:
    read = read_source(str(make(tmp_path)), on_invalid="replace")
    assert (read.texts[0], read.texts[1], len(read.texts), read.drops) == ("one", MENDED, 3, [])
    marks = "\ufffd \ufffdx" if make is in_jsonl else "\ufffd\ufffd\ufffd \ufffd\ufffd\ufffdx"
    assert read.texts[2] == marks
    skipped = read_source(str(make(tmp_path)))
    assert skipped.texts == ["one"]
    assert [reason for reason, _ in skipped.reasons] == ["invalid_utf8"] * 2


def test_17_a_text_file_is_mended_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(LATIN)
    assert read_source(str(tmp_path / "a.txt"), on_invalid="replace").texts == [MENDED]


def test_17_mended_documents_are_counted_and_are_no_drops(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    summary = make_dataset(
        [in_jsonl(tmp_path)], tiny_tokenizer, tmp_path / "o", on_invalid="replace"
    )
    assert (summary.manifest.dropped, summary.manifest.totals.documents) == ({}, 3)
    assert tokenized(summary).on_invalid == "replace"
    assert {path: a.replaced for path, a in summary.inputs.items()} == {"a.jsonl": 2}
    ids = Dataset.open(str(tmp_path / "o")).document(1).tokens[:-1]
    assert load_tokenizer(tiny_tokenizer).decode(ids) == MENDED
    assert not (tmp_path / "o" / "quarantine").exists()


def test_17_error_stops_at_the_first_and_names_its_place(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = in_jsonl(tmp_path)
    with pytest.raises(InputError) as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / "o", on_invalid="error", max_bad="100%")
    assert str(caught.value.where).startswith("a.jsonl, byte 16: ")
    assert not (tmp_path / "o" / "manifest.json").exists()


def test_17_error_also_refuses_what_an_earlier_run_skipped(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = in_jsonl(tmp_path)
    with pytest.raises(InputError, match="more than --max-bad"):
        make_dataset([source], tiny_tokenizer, tmp_path / "o", max_bad="1")
    with pytest.raises(InputError, match="not valid UTF-8"):
        make_dataset([source], tiny_tokenizer, tmp_path / "o", on_invalid="error", max_bad="100%")
    make_dataset([source], tiny_tokenizer, tmp_path / "o", max_bad="2")


def test_17_error_on_clean_text_gives_the_bytes_of_skip_and_replace_is_another_dataset(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(9))
    for policy in ("skip", "error"):
        make_dataset([source], tiny_tokenizer, tmp_path / policy, on_invalid=policy)
    assert digests(tmp_path / "skip") == digests(tmp_path / "error")
    with pytest.raises(ConflictError):
        make_dataset([source], tiny_tokenizer, tmp_path / "skip", on_invalid="replace")


@pytest.mark.slow
def test_17_the_command_exits_4_or_says_how_many_it_mended(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    in_jsonl(tmp_path)
    words = ["tokenize", "a.jsonl", "--tokenizer", tiny_tokenizer, "--workers", "1"]
    stopped = olm_data(*words, "--output", "x", "--on-invalid", "error", folder=tmp_path)
    assert stopped.returncode == 4
    assert "a.jsonl, byte 16" in stopped.stderr
    mended = olm_data(*words, "--output", "y", "--on-invalid", "replace", folder=tmp_path)
    assert mended.returncode == 0, mended.stderr
    assert re.search(r"^replaced +2$", mended.stdout, re.MULTILINE)


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
def test_18_control_characters_come_back_from_tokens_as_they_were(
    tmp_path: Path, tiny_tokenizer: Path, name: str, encoder: str
) -> None:
    text = f"x{CONTROL}y\x00z"
    if name == "a.txt":
        (tmp_path / name).write_bytes(text.encode())
    else:
        write_rows(tmp_path, name[1:], [{"text": text}])
    read = read_source(tmp_path / name)
    assert read.texts == [text]
    assert through(read.texts, tiny_tokenizer, encoder) == [text]


@settings(max_examples=40)
@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_18_any_text_comes_back_from_its_tokens(tiny_tokenizer: Path, texts: list[str]) -> None:
    assert through(texts, tiny_tokenizer, "hf") == texts


def test_18_control_characters_of_the_data_cannot_forge_a_message(tmp_path: Path) -> None:
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


SPACES = [chr(c) for c in range(0x110000) if chr(c).isspace()]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.feather"])
def test_21_each_kind_of_white_space_is_an_empty_document(tmp_path: Path, name: str) -> None:
    texts = ["", *SPACES, "".join(SPACES) * 100, *(f"{s}x" for s in SPACES)]
    write_rows(tmp_path, name[1:], [{"text": text} for text in texts])
    read = read_source(tmp_path / name)
    assert read.texts == [f"{s}x" for s in SPACES]
    assert [reason for reason, _ in read.reasons] == ["empty"] * (len(SPACES) + 2)


@settings(max_examples=60)
@given(texts=st.lists(st.text(st.sampled_from(["a", "\u00e9", *SPACES]), max_size=6), min_size=1))
def test_21_what_is_dropped_is_exactly_what_has_no_visible_character(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("empty") / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    read = read_source(path)
    assert read.texts == [text for text in texts if text.strip()]
    assert len(read.drops) == len(texts) - len(read.texts)


def test_21_an_empty_text_file_is_a_counted_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf \n")
    assert [reason for reason, _ in read_source(tmp_path).reasons] == ["empty", "empty"]


NAMES = ["gpt2", "dolma2", "gpt-neox-dolma", "bert-uncased"]


def promise(spec: TokenizerSpec, encoder: str, texts: list[str]) -> None:
    encoded = make_encoder(encoder, spec, "plain").encode(*concatenate(t.encode() for t in texts))
    assert not np.isin(encoded.ids, special_ids(spec)).any()
    assert encoded.special_hits == sum(
        t.count(token) for t in texts for token in spec.special_tokens
    )
    for k, text in enumerate(texts):
        row = encoded.ids[encoded.offsets[k] : encoded.offsets[k + 1]]
        assert row.tolist() == spec.encode(text)
        if spec.lossless:
            assert spec.decode(row) == text


@pytest.mark.parametrize("encoder", ["hf", "gigatoken"])
def test_22_each_special_token_alone_and_inside_words_is_text(
    tiny_tokenizer: Path, encoder: str
) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    promise(spec, encoder, ["<|endoftext|>", "a<|endoftext|>b", "<|endoftext|>" * 50, "<|endof"])


@settings(max_examples=60)
@given(
    parts=st.lists(
        st.one_of(st.just("<|endoftext|>"), st.text("<|>endoftx \n", max_size=8)), max_size=10
    )
)
def test_22_no_text_makes_a_special_id(tiny_tokenizer: Path, parts: list[str]) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    for encoder in ("hf", "gigatoken"):
        promise(spec, encoder, ["".join(parts), *parts])


@pytest.mark.parametrize("name", NAMES)
def test_22_no_special_token_of_a_real_tokenizer_gets_into_a_document(
    shared_data: Path, name: str
) -> None:
    spec = load_tokenizer(
        shared_data / "tokenizers" / name, eos="[SEP]" if name == "bert-uncased" else "auto"
    )
    texts = []
    for token in spec.special_tokens:
        texts += [token, f"word{token}word", f" {token}\n{token}", token[:-1], token[1:]]
    for encoder in ["hf"] if name == "bert-uncased" else ["hf", "gigatoken"]:
        promise(spec, encoder, texts)
