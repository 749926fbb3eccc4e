"""`verify` on plans, jobs and commit records: every flip found, all findings listed. S7."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from support.forged import flip
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.extensions.verify.datasets import verify

FLIPS = 25


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    source = write_jsonl(folder / "a.jsonl", texts(40))
    make_dataset([source], tiny_tokenizer, folder / "out", shard_tokens=300, holdout="1/5")
    assert verify(str(folder / "out")).ok
    return folder / "out"


@pytest.mark.parametrize("name", ["plan.json", "job.json", "shard-00000.json"])
def test_s7_every_flip_of_a_bit_is_found(name: str, dataset: Path) -> None:
    path = dataset / name
    whole, choose = path.read_bytes(), random.Random(name)
    for _ in range(FLIPS):
        at = choose.randrange(len(whole))
        flipped = bytearray(whole)
        flipped[at] ^= 1 << choose.randrange(8)
        path.write_bytes(flipped)
        report = verify(str(dataset))
        assert any(name in finding.file for finding in report.findings), (at, whole[at : at + 9])


def test_s7_a_damaged_record_does_not_hide_the_findings_behind_it(dataset: Path) -> None:
    for name in ("shard-00000.json", "shard-00001.json"):
        data = (dataset / name).read_bytes()
        (dataset / name).write_bytes(b"[" + data[1:])
    tokens = dataset / "shard-00000.tokens.npy"
    flip(tokens)
    found = {Path(finding.file).name for finding in verify(str(dataset)).findings}
    assert {"shard-00000.json", "shard-00001.json", "shard-00000.tokens.npy"} <= found


def test_s7_a_record_that_is_a_folder_is_one_finding_of_several(dataset: Path) -> None:
    (dataset / "shard-00000.json").unlink()
    (dataset / "shard-00000.json").mkdir()
    (dataset / "shard-00000.ends.npy").unlink()
    found = {Path(finding.file).name for finding in verify(str(dataset)).findings}
    assert {"shard-00000.json", "shard-00000.ends.npy"} <= found


def test_s7_a_job_without_its_digest_is_a_finding_and_none_at_all_is_said(dataset: Path) -> None:
    job = json.loads((dataset / "job.json").read_bytes())
    job["digesT"] = job.pop("digest")
    (dataset / "job.json").write_text(json.dumps(job))
    assert [finding.field for finding in verify(str(dataset)).findings] == ["content"]
    (dataset / "job.json").unlink()
    assert any("there is no" in note for note in verify(str(dataset)).notes)


def test_s7_a_split_that_claims_to_be_split_again_is_not_followed(dataset: Path) -> None:
    shutil.rmtree(dataset / "validation")
    (dataset / "validation").symlink_to(dataset)
    report = verify(str(dataset))
    assert any(finding.field == "split" for finding in report.findings)
    assert len(report.datasets) == 2
