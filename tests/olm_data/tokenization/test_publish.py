"""The manifests of a finished run: both splits, and what is counted over them."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.tokenization.summary import RunResult
from olm_data.tokenizer.tokenizer import load_tokenizer


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Three JSONL files of 40 documents each."""
    return [write_jsonl(tmp_path / f"{k}.jsonl", texts(40, 40 * k)) for k in range(3)]


def decoded(dataset: Dataset, tokenizer: Path) -> list[str]:
    spec = load_tokenizer(tokenizer)
    return [spec.decode(dataset.document(n).tokens[:-1]) for n in range(dataset.documents)]


def test_the_validation_split_is_chosen_by_content_and_overlaps_nothing(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    made = make_dataset(inputs, tiny_tokenizer, tmp_path / "out", shard_tokens=300, holdout="1/4")
    train = decoded(Dataset.open(str(tmp_path / "out")), tiny_tokenizer)
    held = decoded(Dataset.open(str(tmp_path / "out" / "validation")), tiny_tokenizer)
    assert made.validation is not None
    assert sorted(train + held) == sorted(texts(120))
    assert held == [
        text
        for text in texts(120)
        if int.from_bytes(xxhash.xxh3_128_digest(text.encode())[:8], "little") < 2**62
    ]
    assert 10 < len(held) < 60
    totals = made.manifest.totals
    assert totals.other_split == len(held)
    assert made.validation.plan == made.manifest.plan


def test_an_empty_validation_split_is_a_dataset_of_no_documents(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    made = make_dataset(inputs[:1], tiny_tokenizer, tmp_path / "out", holdout="1/1000000000")
    assert made.validation is not None
    assert made.validation.totals.documents == 0
    assert Dataset.open(str(tmp_path / "out" / "validation")).tokens == 0


def test_the_fingerprint_names_the_texts_whatever_the_files_order_shards_or_split(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", texts(70))
    b = write_jsonl(tmp_path / "b.jsonl", texts(50, 70))
    both = write_jsonl(tmp_path / "c.jsonl", reversed(texts(120)))
    one = make_dataset([a, b], tiny_tokenizer, tmp_path / "one", shard_tokens=500)
    other = make_dataset([both], tiny_tokenizer, tmp_path / "other", holdout="1/3")
    fewer = make_dataset([a], tiny_tokenizer, tmp_path / "fewer")
    assert RunResult.of(one).content == RunResult.of(other).content
    assert RunResult.of(one).content != RunResult.of(fewer).content
