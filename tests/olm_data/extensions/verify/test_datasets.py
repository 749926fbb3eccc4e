"""Verifying: a sound dataset passes, and each kind of damage is found and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from support.adding import add_to
from support.forged import fields, flip, rewrite
from support.project import Project
from support.small_datasets import mix_datasets
from support.tokenizer_kinds import variant_of, word_level
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.bounded_json import digest
from olm_data.errors import InputError
from olm_data.extensions.verify.datasets import verify
from olm_data.storage.store import Store


def report_documents(dataset: Path) -> int:
    return int(json.loads((dataset / "manifest.json").read_bytes())["totals"]["documents"])


def test_a_sound_dataset_passes_with_its_validation_split(made: Path) -> None:
    report = verify(str(made))
    assert (report.findings, len(report.datasets), report.documents) == ([], 2, 80)
    assert report.shards > 4
    assert report.round_trip == 64 + min(64, report_documents(made / "validation"))
    assert report.bytes_read > 2 * report.tokens


def test_the_manifest_itself_may_be_named(made: Path) -> None:
    assert verify(str(made / "manifest.json")).ok


def test_no_dataset_is_no_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no dataset"):
        verify(str(tmp_path))


def test_a_missing_tokenizer_plan_or_split_is_named(dataset: Path) -> None:
    (dataset / "tokenizer.json").unlink()
    (dataset / "plan.json").unlink()
    (dataset / "validation" / "manifest.json").unlink()
    found = fields(verify(str(dataset)))
    assert {("tokenizer.json", "file"), ("plan.json", "file"), ("manifest.json", "file")} <= found


def test_all_findings_are_listed_not_only_the_first(dataset: Path) -> None:
    for kind in ("tokens.npy", "ends.npy", "docs.parquet"):
        path = dataset / f"shard-00002.{kind}"
        flip(path)
    names = {name for name, _ in fields(verify(str(dataset)))}
    assert names >= {f"shard-00002.{kind}" for kind in ("tokens.npy", "ends.npy", "docs.parquet")}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda v: v["shards"][0].update(max_token_id=1), "max_token_id"),
        (lambda v: v["shards"][0].update(text_bytes=1), "text_bytes"),
        (lambda v: v["totals"].update(documents_in=7), "documents_in"),
        (lambda v: v["totals"].update(other_split=0), "totals"),
        (lambda v: v["max_documents_in"].update({"64": 1}), "max_documents_in"),
        (lambda v: v["inputs"][0].update(documents=1), "documents"),
        (lambda v: v["inputs"][0].update(sha256="0" * 64), "sha256"),
        (lambda v: v.update(plan="0" * 64), "plan"),
        (lambda v: v["tokenizer"].update(probe_sha256="0" * 64), "ids of the probe text"),
        (lambda v: v["tokenizer"].update(vocab_size=511), "vocab_size"),
        (lambda v: v["tokenizer"].update(sha256="0" * 64), "sha256"),
    ],
)
def test_a_forged_manifest_with_a_right_digest_is_found_out_by_the_shards(
    change: Callable[[dict[str, Any]], None], field: str, dataset: Path
) -> None:
    rewrite(dataset, change)
    report = verify(str(dataset))
    assert field in {found.field for found in report.findings}


def test_a_normalising_tokenizer_is_verified_without_a_round_trip(tmp_path: Path) -> None:
    lower = variant_of(word_level(), normalizer={"type": "Lowercase"})
    (tmp_path / "tokenizer.json").write_bytes(lower)
    source = write_jsonl(tmp_path / "a.jsonl", ["The cat", "mat"])
    make_dataset([source], tmp_path / "tokenizer.json", tmp_path / "out")
    report = verify(str(tmp_path / "out"))
    assert report.ok
    assert report.round_trip == 0
    assert any("normalises" in note for note in report.notes)


def test_a_lock_is_verified_with_every_dataset_it_names(project: Project) -> None:
    for name, start in (("a", 0), ("b", 100)):
        source = project.write(f"{name}.jsonl", texts(30, start))
        project.make([source], name)
    stages = [(640, {"a": 1, "b": 1})]
    lock = str(mix_datasets(project.folder, ["a", "b"], stages=stages, sequence_length=64))
    report = verify(lock)
    assert report.ok
    assert (len(report.datasets), report.documents) == (2, 60)
    path = project / "b" / "shard-00000.tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])
    assert ("shard-00000.tokens.npy", "bytes") in fields(verify(lock))
    shutil.rmtree(project / "b")
    assert not verify(lock).ok
    value = json.loads(Path(lock).read_bytes())
    value["seed"] = 2
    Path(lock).write_text(json.dumps(value))
    (finding,) = verify(lock).findings
    assert finding.field == "lock"
    with pytest.raises(InputError, match="no lock"):
        verify(str(project / "none.json"))


def test_progress_counts_all_splits_and_datasets_as_one_and_ends_at_the_whole(made: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(str(made), watch=lambda read, total: seen.append((read, total)))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {report.bytes_read}
    assert seen[-1] == (report.bytes_read, report.bytes_read)


# AUDIT row S7: the job of an addition is no damage of the versions before it.
def test_s7_a_lock_of_an_older_version_verifies_and_a_false_job_does_not(project: Project) -> None:
    out = project.out
    project.make([project.write("a.jsonl", texts(20))])
    manifest = (out / "manifest.json").read_bytes()
    lock = mix_datasets(project.folder, ["out"], stages=[(64, {"out": 1})], sequence_length=32)
    add_to(out, project.write("b.jsonl", texts(20, 100)))
    assert verify(str(lock)).ok
    assert verify(str(out)).ok
    (out / "manifest.json").write_bytes(manifest)  # as if the addition had been killed
    assert verify(str(out)).ok

    job = json.loads((out / "job.json").read_bytes())
    for change in ({"plan_file": "plan.json"}, {"plan_sha256": "0" * 64}):
        false = job | change
        false["digest"] = digest({k: v for k, v in false.items() if k != "digest"})
        Store(str(out)).put("job.json", json.dumps(false).encode())
        assert not verify(str(out)).ok, change


# Row S4: a file that is larger than its record says is not read to its end before that is said.
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
