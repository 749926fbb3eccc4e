"""`job.json`: it reads back, and a change is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.dataset.job import JobFile, TokenizerIdentity
from olm_data.errors import ValidationError
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer


def job_of(tokenizer: Path) -> JobFile:
    return JobFile(
        plan_file="plan.json",
        packages={"olm": "1"},
        plan_sha256="0" * 64,
        plan="1" * 64,
        inputs=(
            InputFile(
                path="a.jsonl",
                url="/x/a.jsonl",
                bytes=1,
                revision="r",
                format="jsonl",
                position="line",
            ),
        ),
        read=ReadOptions(sample="1/2", seed=4),
        tokenizer=TokenizerIdentity.of(load_tokenizer(tokenizer)),
        encoder="hf",
        routed=(),
        special="plain",
        holdout=0,
        single_writer=False,
        shuffle=None,
        duplicates="keep",
    )


def test_a_job_reads_back_and_a_change_is_noticed(tiny_tokenizer: Path, tmp_path: Path) -> None:
    job, path = job_of(tiny_tokenizer), tmp_path / "job.json"
    path.write_bytes(job.encode())
    found = JobFile.read_from(Store(tmp_path))
    assert (found.read, found.inputs, found.digest) == (job.read, job.inputs, job.compute_digest())
    path.write_bytes(job.encode().replace(b"/x/", b"/y/"))
    assert JobFile.read_from(Store(tmp_path), checked=False).inputs[0].url == "/y/a.jsonl"
    with pytest.raises(MalformedJson, match="digest"):
        JobFile.read_from(Store(tmp_path))


def test_a_tokenizer_is_the_one_the_run_began_with(tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    identity = TokenizerIdentity.of(spec)
    assert identity.open(spec.json_bytes) == spec
    with pytest.raises(ValidationError, match="not the tokenizer the run began with"):
        identity.open(spec.json_bytes + b" ")
