"""Which files arguments stand for, and what among them is not read."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.inputs import jsonl
from support.project import Project
from support.reading import read_source, resolve_source
from support.s3 import client
from support.tokenizing import write_jsonl

from olm_data.dataset.inputs import ReadOptions
from olm_data.errors import InputError, UsageError
from olm_data.sources.listing import list_files
from olm_data.storage.store import Store
from olm_data.tokenization.request import identical_inputs


def passed(*arguments: Any) -> dict[str, set[str]]:
    """Return reason -> names of what is not read."""
    counted = resolve_source(list(map(str, arguments))).passed
    return {reason: set(found.names) for reason, found in counted.items()}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder of all formats and of everything that is not read."""
    folder = tmp_path / "mixed"
    (folder / "sub" / ".git").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", ["a line"])
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "a zstd line"}\n'))
    (folder / "c.txt").write_text("a text")
    pq.write_table(pa.table({"text": ["a row"]}), folder / "sub" / "d.parquet")
    (folder / "sub" / "notes.md").write_text("notes are text")
    for name in ("README.md", "LICENSE", "sub/LICENSE.txt", "x.bin", "sub/y.doc", ".hidden.txt"):
        (folder / name).write_text("not read")
    (folder / "empty.jsonl").touch()
    (folder / "sub" / ".git" / "z.jsonl").write_text("not read")
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    return folder


def test_a_mixed_folder_is_read_whole_and_the_rest_is_named_with_its_reason(mixed: Path) -> None:
    read = read_source(mixed)
    assert sorted(read.texts) == ["a line", "a row", "a text", "a zstd line", "notes are text"]
    assert passed(mixed) == {
        "about": {"mixed/README.md", "mixed/LICENSE", "mixed/sub/LICENSE.txt"},
        "format": {"mixed/x.bin", "mixed/sub/y.doc"},
        "hidden": {"mixed/.hidden.txt", "mixed/sub/.git/"},
        "empty": {"empty.jsonl"},
        "link": {"mixed/link/"},
        "special": {"mixed/pipe.jsonl", "mixed/socket"},
    }


def test_one_jsonl_among_thirty_texts_does_not_hide_them(tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"{n:02d}.txt").write_text(f"text {n}")
    write_jsonl(tmp_path / "one.jsonl", ["a line"])
    assert len(read_source(tmp_path).texts) == 31
    assert passed(tmp_path) == {}


def test_a_pattern_counts_what_it_matches_and_does_not_read(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mixed)
    assert passed("*") == {
        "format": {"LICENSE", "x.bin"},
        "hidden": {".hidden.txt"},
        "folder": {"link/", "sub/"},
        "special": {"pipe.jsonl", "socket"},
        "empty": {"empty.jsonl"},
    }
    assert passed("*.jsonl") == {"special": {"pipe.jsonl"}, "empty": {"empty.jsonl"}}
    with pytest.raises(InputError, match="no format"):
        passed("*.bin")


def test_a_prefix_on_s3_is_read_as_the_folder_is(mixed: Path, s3: dict[str, str]) -> None:
    from support.s3 import client

    own = client(s3)
    for path in sorted(mixed.rglob("*")):
        if path.is_file():
            key = f"u1/{path.relative_to(mixed.parent)}"
            own.put_object(Bucket=s3["bucket"], Key=key, Body=path.read_bytes())
    here, there = passed(mixed), passed(f"s3://{s3['bucket']}/u1/mixed")
    for reason in ("about", "format", "empty"):
        assert there[reason] == here[reason]
    assert there["hidden"] == {"mixed/.hidden.txt", "mixed/sub/.git/z.jsonl"}
    matched = passed(f"s3://{s3['bucket']}/u1/mixed/*")
    assert matched["format"] == {"mixed/LICENSE", "mixed/x.bin"}


def test_a_folder_that_may_not_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["a line"])
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if os.fspath(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(closed))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match="cannot be read") as caught:
        resolve_source([str(tmp_path)])
    assert "closed" in str(caught.value)


def test_a_pipe_as_an_input_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="a pipe, a socket or a device"):
        resolve_source([str(tmp_path / "pipe.jsonl")])


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
    with pytest.raises(InputError, match=r"did you mean '.*/novels.jsonl'"):
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


# The same content under two names: found, and told from what only looks the same.
def test_one_byte_in_the_middle_of_a_large_file_makes_another_content(tmp_path: Path) -> None:
    data = bytearray(b"x" * 400_000)
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "c.jsonl").write_bytes(data)
    data[200_000] = 0
    (tmp_path / "b.jsonl").write_bytes(data)
    (tmp_path / "d.jsonl").write_bytes(data[1:])
    pairs = identical_inputs(list_files([str(tmp_path)]).files, ReadOptions())
    assert [(later.path, first.path) for later, first in pairs] == [("c.jsonl", "a.jsonl")]


def test_text_files_of_one_document_each_are_duplicates_and_no_error(project: Project) -> None:
    folder = project / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("the same licence text")
    made = project.make([folder])
    assert (made.manifest.totals.documents, made.manifest.tools.copies.duplicates) == (2, 1)


def test_equal_objects_of_a_remote_store_are_found_whatever_their_etags(
    s3: dict[str, str], tiny_tokenizer: Path
) -> None:
    prefix, data = f"s3://{s3['bucket']}/row-26", b'{"text": "some words"}\n' * 400_000
    store = Store(prefix)
    store.put("a.jsonl", data)
    store.put("b.jsonl", data)
    upload_in_parts(s3, "row-26/c.jsonl", data)
    inputs = list_files([prefix]).files
    assert len({item.revision for item in inputs}) == 2
    pairs = identical_inputs(inputs, ReadOptions())
    assert [(later.path, first.path) for later, first in pairs] == [
        ("b.jsonl", "a.jsonl"),
        ("c.jsonl", "a.jsonl"),
    ]


def upload_in_parts(s3: dict[str, str], key: str, data: bytes) -> None:
    """Store an object whose ETag is not the md5 of its bytes."""
    own, place = client(s3), {"Bucket": s3["bucket"], "Key": key}
    upload = own.create_multipart_upload(**place)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(data), 5 << 20), 1):
        part = {"PartNumber": number, "UploadId": upload, "Body": data[start : start + (5 << 20)]}
        parts.append({"PartNumber": number, "ETag": own.upload_part(**place, **part)["ETag"]})
    own.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": parts})
