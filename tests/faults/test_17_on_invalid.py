"""Row 17: text that is not UTF-8 is skipped into the quarantine, mended, or an error, as asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command import olm_data
from support.reading import read_source
from support.tokenizing import digests, make_dataset, texts, tokenized, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError
from olm_data.tokenizer.tokenizer import load_tokenizer

BAD = b"caf\xe9 \xc0\xaf \xed\xa0\x80 end"  # Latin-1, an overlong form, a surrogate
MENDED = BAD.decode(errors="replace")


def in_jsonl(folder: Path) -> Path:
    lines = [b'{"text": "one"}', b'{"text": "%b"}' % BAD, b'{"text": "\\ud800 \\udc00x"}']
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    return folder / "a.jsonl"


def in_parquet(folder: Path) -> Path:
    column = pa.array([b"one", BAD, b"\xed\xa0\x80 \xed\xb0\x80x"], pa.binary())
    pq.write_table(pa.table({"text": column}), folder / "a.parquet")
    return folder / "a.parquet"


@pytest.mark.parametrize("make", [in_jsonl, in_parquet])
def test_replace_keeps_the_document_with_a_mark_for_what_cannot_be_decoded(
    make: Any, tmp_path: Path
) -> None:
    read = read_source(str(make(tmp_path)), on_invalid="replace")
    assert (read.texts[0], read.texts[1], len(read.texts), read.drops) == ("one", MENDED, 3, [])
    marks = "\ufffd \ufffdx" if make is in_jsonl else "\ufffd\ufffd\ufffd \ufffd\ufffd\ufffdx"
    assert read.texts[2] == marks
    skipped = read_source(str(make(tmp_path)))
    assert skipped.texts == ["one"]
    assert [reason for reason, _ in skipped.reasons] == ["invalid_utf8"] * 2


def test_a_text_file_is_mended_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BAD)
    assert read_source(str(tmp_path / "a.txt"), on_invalid="replace").texts == [MENDED]


def test_mended_documents_are_counted_and_are_no_drops(
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


def test_error_stops_at_the_first_and_names_its_place(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = in_jsonl(tmp_path)
    with pytest.raises(InputError) as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / "o", on_invalid="error", max_bad="100%")
    assert str(caught.value.where).startswith("a.jsonl, byte 16: ")
    assert not (tmp_path / "o" / "manifest.json").exists()


def test_error_also_refuses_what_an_earlier_run_skipped(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = in_jsonl(tmp_path)
    with pytest.raises(InputError, match="more than --max-bad"):
        make_dataset([source], tiny_tokenizer, tmp_path / "o", max_bad="1")
    with pytest.raises(InputError, match="not valid UTF-8"):
        make_dataset([source], tiny_tokenizer, tmp_path / "o", on_invalid="error", max_bad="100%")
    make_dataset([source], tiny_tokenizer, tmp_path / "o", max_bad="2")


def test_error_on_clean_text_gives_the_bytes_of_skip_and_replace_is_another_dataset(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(9))
    for policy in ("skip", "error"):
        make_dataset([source], tiny_tokenizer, tmp_path / policy, on_invalid=policy)
    assert digests(tmp_path / "skip") == digests(tmp_path / "error")
    with pytest.raises(ConflictError):
        make_dataset([source], tiny_tokenizer, tmp_path / "skip", on_invalid="replace")


@pytest.mark.slow
def test_the_command_exits_4_or_says_how_many_it_mended(
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
