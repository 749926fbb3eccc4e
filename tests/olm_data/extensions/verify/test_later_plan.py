"""AUDIT row S7: the job of an addition is no damage of the versions before it."""

from __future__ import annotations

import json
from pathlib import Path

from support.adding import add_to
from support.small_datasets import mix_datasets
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.bounded_json import digest
from olm_data.extensions.verify.datasets import verify
from olm_data.storage.store import Store


def test_s7_a_lock_of_an_older_version_verifies_and_a_false_job_does_not(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    out = tmp_path / "out"
    make_dataset([write_jsonl(tmp_path / "a.jsonl", texts(20))], tiny_tokenizer, out)
    manifest = (out / "manifest.json").read_bytes()
    lock = mix_datasets(tmp_path, ["out"], stages=[(64, {"out": 1})], sequence_length=32)
    add_to(out, write_jsonl(tmp_path / "b.jsonl", texts(20, 100)))
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
