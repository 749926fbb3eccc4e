"""Which files an argument stands for, and the names they get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import s3fs
from support.reading import read_plan

from olm_data.dataset.inputs import ReadOptions, Unit
from olm_data.errors import InputError, StorageError, UsageError
from olm_data.sources import current_revision, resolve_source


def jsonl(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def paths(*arguments: Any) -> list[str]:
    return [file.path for file in resolve_source(list(map(str, arguments))).inputs]


def test_names_are_relative_to_the_common_root_so_no_machine_path_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = jsonl(tmp_path / "x" / "a.jsonl", "1"), jsonl(tmp_path / "y" / "b.jsonl", "2")
    assert paths(a) == ["a.jsonl"]
    assert paths(b, a) == ["y/b.jsonl", "x/a.jsonl"]
    assert paths(tmp_path) == ["x/a.jsonl", "y/b.jsonl"]
    monkeypatch.chdir(tmp_path / "x")
    assert paths("a.jsonl") == ["a.jsonl"]
    assert paths("../y/*.jsonl") == ["b.jsonl"]


def test_a_readme_is_a_document_only_where_there_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden.jsonl").write_text("")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert paths(tmp_path) == ["README.md"]
    jsonl(tmp_path / "data" / "a.jsonl", "1")
    jsonl(tmp_path / "data" / ".git" / "b.jsonl", "1")
    assert paths(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("name", ["missing.jsonl", "no/such/folder", "*.nothing"])
def test_nothing_there_is_an_input_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        paths(tmp_path / name)


def test_a_near_miss_of_a_file_name_is_suggested(tmp_path: Path) -> None:
    jsonl(tmp_path / "novels.jsonl", "1")
    with pytest.raises(InputError, match=r"did you mean 'novels.jsonl'"):
        paths(tmp_path / "novel.jsonl")


def test_unknown_formats_and_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="no format"):
        paths(tmp_path / "a.bin")
    with pytest.raises(InputError, match="no file of a known format"):
        paths(tmp_path)
    with pytest.raises(UsageError, match="not supported"):
        paths("ftp://host/a.jsonl")
    with pytest.raises(UsageError, match="credentials") as caught:
        paths("s3://key:canary-secret@bucket/a.jsonl")
    assert "canary" not in str(caught.value)


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    a = jsonl(tmp_path / "a.jsonl", "1")
    with pytest.raises(InputError, match="named twice"):
        paths(a, tmp_path)


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
    assert msgspec.convert(plan.options.stored(), ReadOptions) == plan.options
    assert msgspec.json.encode(unit) == b"[0,1,2,3]"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"inputs": ["a.jsonl"], "source": "pylib"},
        {"inputs": ["a.jsonl"], "subset": "x"},
        {"inputs": ["a.jsonl"], "root": "/x"},
        {"source": "pylib", "root": "/x"},
        {"source": "pylib", "split": "train"},
        {"source": "pylib", "subset": "nothing"},
        {"source": "hf:a/b", "subset": "x"},
        {"source": "finewebedu"},
        {"source": "fineweb-edu", "subset": "sample-10bt"},
    ],
    ids=str,
)
def test_arguments_that_do_not_go_together_are_usage_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        resolve_source(**arguments)


def test_files_on_s3_read_as_local_ones_do(tmp_path: Path, s3: dict[str, str]) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=s3["endpoint_url"])
    local = []
    for name in ("a.jsonl", "sub/b.jsonl"):
        path = jsonl(tmp_path / name, *(f"{name} {k}" for k in range(100)))
        client.put_object(Bucket=s3["bucket"], Key=f"text/{name}", Body=path.read_bytes())
        local.append(path)
    here = read_plan(resolve_source([str(tmp_path)]), 500)
    plan = resolve_source([f"s3://{s3['bucket']}/text"])
    there = read_plan(plan, 500)
    assert (here.texts, here.places) == (there.texts, there.places)
    assert there.units > 4
    assert all(current_revision(file) == file.revision for file in plan.inputs)
    client.put_object(Bucket=s3["bucket"], Key="text/a.jsonl", Body=b"other")
    assert current_revision(plan.inputs[0]) != plan.inputs[0].revision
    assert [f.path for f in resolve_source([f"s3://{s3['bucket']}/text/sub/*.jsonl"]).inputs] == [
        "b.jsonl"
    ]
    with pytest.raises(InputError, match="no such file"):
        resolve_source([f"s3://{s3['bucket']}/text/nothing.jsonl"])


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
