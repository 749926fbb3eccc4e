"""Which files an argument stands for, and the names they get."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import s3fs
from support.inputs import jsonl
from support.reading import resolve_source

from olm_data.dataset.inputs import ReadOptions, Unit
from olm_data.errors import StorageError
from olm_data.sources import current_revision


def test_a_changed_file_has_another_revision(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", "1")
    (file,) = resolve_source([str(path)]).inputs
    assert current_revision(file) == file.revision
    jsonl(path, "12")
    assert current_revision(file) != file.revision
    path.unlink()
    assert current_revision(file) == ""


def test_plans_survive_json(tmp_path: Path) -> None:
    plan = resolve_source([str(jsonl(tmp_path / "a.jsonl", "1"))])
    (file,) = plan.inputs
    unit = Unit(input=0, start=1, stop=2, bytes=3)
    for value in (file, plan.options, unit):
        assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
    assert msgspec.convert(msgspec.to_builtins(plan.options), ReadOptions) == plan.options
    assert msgspec.json.encode(unit) == b"[0,1,2,3]"


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "canary-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()  # one made by another test knows another server
    for name in ("a.jsonl", "*.jsonl"):
        with pytest.raises(StorageError) as caught:
            resolve_source([f"s3://bucket-of-nobody/{name}"])
        assert "canary" not in str(caught.value)
    s3fs.S3FileSystem.clear_instance_cache()
