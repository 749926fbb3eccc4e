"""Row S4: a file that is larger than its record says is not read to its end before that is said."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest
from support.small_datasets import mix_datasets
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.extensions.verify.datasets import verify
from olm_data.storage.store import Store

HUGE = 1 << 40


@pytest.fixture
def place(tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset and a lock with row plans; whoever hashes more than 1 MB of it fails."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    make_dataset([source], tiny_tokenizer, tmp_path / "web")
    stages = [(500, {"web": 1})]
    mix_datasets(tmp_path, ["web"], stages=stages, sequence_length=16, packing="best_fit")
    honest = Store.sha256

    def bounded(store: Store, name: str) -> str:
        assert (store.size(name) or 0) < 1 << 20, name
        return honest(store, name)

    monkeypatch.setattr(Store, "sha256", bounded)
    return tmp_path


def test_s4_verify_reads_no_document_rows_of_another_size(place: Path) -> None:
    os.truncate(place / "web/shard-00000.docs.parquet", HUGE)
    for sample in (None, Fraction(1, 2)):
        report = verify(str(place / "web"), sample=sample)
        assert any(f.field == "bytes" and f.found == str(HUGE) for f in report.findings)


def test_s4_nor_where_the_record_that_knows_the_size_is_damaged(place: Path) -> None:
    os.truncate(place / "web/shard-00000.docs.parquet", HUGE)
    (place / "web/shard-00000.json").write_text("{}")
    report = verify(str(place / "web"))
    assert any(f.field == "bytes" and f.found == str(HUGE) for f in report.findings)


@pytest.mark.parametrize("name", ["starts.npy", "lengths.npy", "ends.npy"])
def test_s4_verify_reads_no_row_plan_of_another_size(name: str, place: Path) -> None:
    (lock,) = place.glob("*.lock.json")
    (plan,) = place.glob(f"row-plans/*/{name}")
    os.truncate(plan, HUGE)
    report = verify(str(lock))
    assert [(f.field, f.found) for f in report.findings] == [("bytes", str(HUGE))]
    plan.unlink()
    assert [f.found for f in verify(str(lock)).findings] == ["missing"]
