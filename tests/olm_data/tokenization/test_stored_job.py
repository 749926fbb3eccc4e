"""job.json: a worker elsewhere gets the same job, or an error that says what is not the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.beginning import begin
from support.project import Project
from support.tokenizing import texts, write_jsonl

from olm_data.bounded_json import digest
from olm_data.errors import ValidationError
from olm_data.runners.base import Runner
from olm_data.storage.store import Store
from olm_data.tokenization.stored_job import load_job, write_job


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(120))


OPTIONS: dict[str, Any] = {"shard_tokens": 500, "holdout": "1/8", "bos": "<|endoftext|>"}


def test_the_stored_job_is_the_job(source: Path, project: Project) -> None:
    seen: list[Any] = []

    class Keep(Runner):
        def run(self, job: Any, tasks: Any, total: int, **_: Any) -> None:
            seen.append(job)
            assert load_job(str(project.out)) == job
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        project.make([source], runner=Keep(), special="allow", **OPTIONS)
    assert seen


def test_a_rerun_looks_at_a_job_of_any_size_that_can_be_written(
    source: Path, monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    class Again(Runner):
        def run(self, job: Any, tasks: Any, total: int, **_: Any) -> None:
            before = (project.out / "job.json").stat()
            assert Store.read.__kwdefaults__ is not None
            monkeypatch.setitem(Store.read.__kwdefaults__, "limit", 10)  # of what knows no other
            write_job(job, "plan.json")
            assert (project.out / "job.json").stat() == before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        project.make([source], runner=Again(), **OPTIONS)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("job.json", lambda data: b"{", "damaged"),
        ("job.json", lambda data: b"[]", "damaged"),
        ("job.json", lambda data: data.replace(b'"holdout"', b'"h"'), "damaged"),
        ("job.json", lambda data: data.replace(b'"read": {', b'"read": {"more": 1,'), "damaged"),
        ("plan.json", lambda data: data.replace(b"500", b"501"), "damaged"),
        ("tokenizer.json", lambda data: data + b" ", "not the tokenizer"),
        ("job.json", lambda data: data.replace(b'"probe_sha256": "', b'"probe_sha256": "0'), "ids"),
        ("job.json", lambda data: data.replace(b'"pyarrow": "', b'"pyarrow": "0'), "versions"),
    ],
)
def test_files_of_another_run_or_machine_are_refused(
    name: str, change: Any, says: str, source: Path, project: Project
) -> None:
    begin(source, project.tokenizer, project.out, shard_tokens=125)
    path = project.out / name
    before = path.read_bytes()
    path.write_bytes(change(before))
    if says in ("ids", "versions"):  # what a forger would do
        value = json.loads(path.read_bytes())
        path.write_text(
            json.dumps(
                value | {"digest": digest({k: v for k, v in value.items() if k != "digest"})}
            )
        )
    assert path.read_bytes() != before
    with pytest.raises(ValidationError, match=says):
        load_job(str(project.out))
