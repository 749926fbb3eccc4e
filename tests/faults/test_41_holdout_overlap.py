"""FAULTS row 41: no validation document is also in train, whatever is added or repeated."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.extensions.verify.datasets import verify


def hashes(folder: Path) -> set[int]:
    found: set[int] = set()
    for path in folder.glob("*.docs.parquet"):
        found |= set(pq.read_table(path)["content_hash"].to_pylist())
    return found


def test_41_repeated_documents_fall_on_one_side(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", texts(100))
    again = write_jsonl(tmp_path / "b.jsonl", texts(150))
    out = tmp_path / "out"
    made = make_dataset([first, again], tiny_tokenizer, out, shard_tokens=700, holdout="1/5")
    assert made.validation is not None
    assert made.manifest.totals.documents + made.validation.totals.documents == 250
    train, held = hashes(out), hashes(out / "validation")
    assert train
    assert held
    assert not train & held
    assert len(train | held) == 150
    assert verify(str(out)).ok  # proves it again, without a join, from the documents' hashes


def test_41_train_of_one_dataset_never_meets_validation_of_another_with_the_same_holdout(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    for name, start in (("x", 0), ("y", 30)):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts(60, start))
        make_dataset([source], tiny_tokenizer, tmp_path / name, holdout="1/5")
    assert not hashes(tmp_path / "x") & hashes(tmp_path / "y" / "validation")
    assert not hashes(tmp_path / "y") & hashes(tmp_path / "x" / "validation")
