"""Records become documents of a shard: their ids, columns and places, in input order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.inline_runner import InlineRunner
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError
from olm_data.runners.base import Count
from olm_data.tokenizer.tokenizer import load_tokenizer


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Three JSONL files of 40 documents each."""
    return [write_jsonl(tmp_path / f"{k}.jsonl", texts(40, 40 * k)) for k in range(3)]


def test_ids_are_the_references_with_eos_after_each_document(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset(inputs[:1], tiny_tokenizer, tmp_path / "out")
    dataset, spec = Dataset.open(str(tmp_path / "out")), load_tokenizer(tiny_tokenizer)
    for number, text in enumerate(texts(40)):
        assert dataset.document(number).tokens.tolist() == [*spec.encode(text), spec.eos]


def test_bos_and_no_eos_are_as_asked(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    text = texts(1)[0]
    for eos, bos in (("none", "<|endoftext|>"), ("none", "none"), ("auto", "<|endoftext|>")):
        out = tmp_path / f"{eos}-{bos[:1]}"
        made = make_dataset(inputs[:1], tiny_tokenizer, out, eos=eos, bos=bos)
        expected = [spec.eos] * (bos != "none") + spec.encode(text) + [spec.eos] * (eos == "auto")
        assert Dataset.open(str(out)).document(0).tokens.tolist() == expected
        assert made.manifest.tokenizer.eos == (None if eos == "none" else spec.eos)


def test_provenance_leads_back_to_the_line_in_the_file(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset(inputs, tiny_tokenizer, tmp_path / "out", shard_tokens=300, id_column="id")
    dataset = Dataset.open(str(tmp_path / "out"))
    for number in (0, 41, 119):
        document = dataset.document(number)
        assert document.position_kind == "byte"
        with open(tmp_path / document.input, "rb") as file:
            file.seek(document.position)
            record = json.loads(file.readline())
        assert record["text"] == texts(120)[number]
        assert record["id"] == document.id
        assert document.text_bytes == len(record["text"].encode())


def test_kept_columns_stand_beside_each_document(tiny_tokenizer: Path, tmp_path: Path) -> None:
    table = pa.table({"text": texts(10), "url": [f"u{n}" for n in range(10)], "score": range(10)})
    pq.write_table(table, tmp_path / "a.parquet")
    make_dataset([tmp_path / "a.parquet"], tiny_tokenizer, tmp_path / "out", keep=("url", "score"))
    document = Dataset.open(str(tmp_path / "out")).document(7)
    assert document.columns == {"url": "u7", "score": 7}
    assert (document.position_kind, document.position) == ("row", 7)


def test_text_that_spells_a_special_token_is_plain_counted_allowed_or_refused(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["one <|endoftext|> two <|endoftext|>"])
    spec = load_tokenizer(tiny_tokenizer)
    made = make_dataset([source], tiny_tokenizer, tmp_path / "plain")
    assert made.special_hits == 2
    plain = Dataset.open(str(tmp_path / "plain")).document(0).tokens.tolist()
    assert plain.count(spec.eos) == 1
    make_dataset([source], tiny_tokenizer, tmp_path / "allow", special="allow")
    allowed = Dataset.open(str(tmp_path / "allow")).document(0).tokens.tolist()
    assert allowed.count(spec.eos) == 3
    with pytest.raises(InputError, match="endoftext") as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / "error", special="error")
    assert "a.jsonl" in str(caught.value.where)


def test_each_stage_says_how_long_it_was_at_work(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    class Watched(InlineRunner):
        counts = np.zeros(0)

        def run(self, *args: Any, watch: Any, **rest: Any) -> None:
            def both(counts: np.ndarray, running: Any) -> None:
                self.counts = counts
                watch(counts, running)

            super().run(*args, watch=both, **rest)

    runner = Watched()
    make_dataset(inputs, tiny_tokenizer, tmp_path / "out", shard_tokens=300, runner=runner)
    assert (runner.counts[:, [Count.READ_US, Count.ENCODE_US, Count.WRITE_US]] > 0).all()
