"""Which files arguments stand for, what among them is not read, and what goes together."""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
import zstandard
from click.testing import CliRunner
from support.inputs import jsonl
from support.project import Project
from support.reading import read_plan, read_source, resolve_source
from support.s3 import client
from support.tokenizing import texts, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.inputs import ReadOptions, Unit
from olm_data.dataset.tools import PASSED_REASONS, Tools
from olm_data.errors import InputError, OlmError, StorageError, UsageError
from olm_data.extensions.stats.count import collect
from olm_data.sources import current_revision
from olm_data.sources.formats import (
    CODECS,
    FORMATS,
    as_array,
    codec_of,
    describe,
    format_of,
    is_json,
    whole_file,
)
from olm_data.sources.listing import list_files
from olm_data.storage.store import Store
from olm_data.tokenization.request import identical_inputs
from olm_data.tokenizer.tokenizer import load_tokenizer


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


@pytest.mark.parametrize("ending", FORMATS)
def test_a_name_tells_its_format_in_any_case_and_packed_where_it_can_be_streamed(
    ending: str,
) -> None:
    kind = FORMATS[ending]
    assert format_of(f"a{ending.upper()}") == kind
    packed = kind if kind in ("jsonl", "csv", "txt", "html", "warc") else None
    assert {format_of(f"a{ending}{codec}") for codec in CODECS} == {packed}


def test_places_are_lines_in_packed_json_lines_and_elements_in_arrays() -> None:
    plain, packed = describe("/a.json", 5, "r"), describe("/a.json.gz", 5, "r")
    assert (plain.position, packed.position) == ("byte", "line")
    assert is_json(plain.url)
    assert is_json(packed.url)
    assert not is_json("a.jsonl")
    assert as_array(packed).position == "row"
    assert as_array(packed).format == "json"


def test_a_packed_file_is_planned_for_more_text_than_it_stores() -> None:
    (plain,), (packed,) = (whole_file(3, describe(name, 100, "")) for name in ("a.txt", "a.txt.xz"))
    assert (plain.input, plain.start, plain.stop, plain.bytes) == (3, 0, 1, 100)
    assert packed.bytes > plain.bytes
    assert whole_file(0, describe("a.txt", 0, ""))[0].bytes == 1


@pytest.mark.parametrize("name", ["a", "a.gz", "a.parquet.gz", "a.exe", "jsonl"])
def test_a_name_that_tells_no_format_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InputError, match="tells no format") as caught:
        describe(name, 0, "")
    assert ".parquet" in str(caught.value.fix)


def test_only_the_last_ending_names_the_codec() -> None:
    assert codec_of("a.gz.txt") is None
    assert codec_of("A.TXT.ZST") == "zstd"


def test_the_result_the_manifest_and_stats_say_what_was_not_read(project: Project) -> None:
    folder = project / "books"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts(20))
    alone = project.make([folder], "alone")
    for n in range(25):
        (folder / f"{n:02d}.doc").touch()
    (folder / "forged\n1 document\x1b[31m.bin").touch()
    log = io.StringIO()
    done = project.make([folder], log=log)
    assert done.manifest.digest == alone.manifest.digest  # what is not read decides no byte
    counted = done.manifest.tools.passed_over
    assert (counted["format"].count, len(counted["format"].names)) == (26, 20)
    assert "not read: 26 format" in log.getvalue()
    assert "\x1b" not in log.getvalue()
    stats = collect(str(project.out))
    assert stats.passed_over["format"].count == 26


def test_strict_inputs_refuses_what_would_not_be_read(project: Project) -> None:
    folder = project / "books"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts(5))
    words = ["tokenize", str(folder), "--tokenizer", str(project.tokenizer), "--workers", "1"]
    words += ["--output", str(project.out), "--strict-inputs", "--dry-run"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    (folder / "b.docx").touch()
    refused = CliRunner().invoke(cli, words)
    assert isinstance(refused.exception, InputError)
    assert "1 file among the inputs would not be read" in str(refused.exception)
    assert "books/b.docx" in str(refused.exception)
    shown = CliRunner().invoke(cli, [word for word in words if word != "--strict-inputs"])
    assert "1 format (the name tells no format that is read): books/b.docx" in shown.output


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 3}', '{"x": {"count": 1}}', "[" * 9999]
)
def test_a_strangers_count_is_no_error(text: str) -> None:
    assert Tools.of({"passed_over": text}).passed_over == {}


def test_counts_of_unknown_reasons_are_left_out() -> None:
    one = {"count": 1, "names": ["a"]}
    counts = json.dumps({"format": one, "forged\x1b": one})
    found = Tools.of({"passed_over": counts}).passed_over
    assert list(found) == ["format"]
    assert set(found) <= set(PASSED_REASONS)


def test_files_on_s3_read_as_local_ones_do(tmp_path: Path, s3: dict[str, str]) -> None:
    from support.s3 import client

    own = client(s3)
    local = []
    for name in ("a.jsonl", "sub/b.jsonl"):
        path = jsonl(tmp_path / name, *(f"{name} {k}" for k in range(100)))
        own.put_object(Bucket=s3["bucket"], Key=f"text/{name}", Body=path.read_bytes())
        local.append(path)
    here = read_plan(resolve_source([str(tmp_path)]), 500)
    plan = resolve_source([f"s3://{s3['bucket']}/text"])
    there = read_plan(plan, 500)
    assert (here.texts, here.places) == (there.texts, there.places)
    assert there.units > 4
    assert all(current_revision(file) == file.revision for file in plan.inputs)
    own.put_object(Bucket=s3["bucket"], Key="text/a.jsonl", Body=b"other")
    assert current_revision(plan.inputs[0]) != plan.inputs[0].revision
    assert [f.path for f in resolve_source([f"s3://{s3['bucket']}/text/sub/*.jsonl"]).inputs] == [
        "b.jsonl"
    ]
    with pytest.raises(InputError, match="no such file"):
        resolve_source([f"s3://{s3['bucket']}/text/nothing.jsonl"])


def numbered(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": f"t{k}", **row}) + "\n" for k, row in enumerate(rows))
    )
    return path


@pytest.mark.parametrize("name", ["id", "input", "position", "text_bytes", "content_hash"])
def test_the_names_of_docs_parquet_are_refused_before_work(tmp_path: Path, name: str) -> None:
    path = numbered(tmp_path / "a.jsonl", [{name: 1}])
    with pytest.raises(UsageError, match="name of a column that each document has"):
        resolve_source([str(path)], keep=[name])


def refused(source: str | None = None, *inputs: str) -> OlmError:
    with pytest.raises(OlmError) as caught:
        resolve_source(list(inputs), source=source)
    return caught.value


@pytest.mark.parametrize("path", ["./local", "../local", "/data/local", "~/local"])
def test_a_local_path_as_a_source_is_called_one(path: str) -> None:
    error = refused(path)
    assert isinstance(error, UsageError)
    assert "this is a local path" in error.what
    assert error.fix == f"name files and folders without --source: {path}"


def test_a_file_that_is_here_as_a_source_is_called_one(here: Path) -> None:
    Path("books.jsonl").write_text("{}")
    assert "this is a local path" in refused("books.jsonl").what
    assert "there is no source named" in refused("other.jsonl").what


@pytest.mark.parametrize(
    "name", ["", "a/b/c", "a b", ":main", "a//b", "./x", "//~/x", "//datasets/o/n/a.txt"]
)
def test_what_cannot_name_a_dataset_is_not_looked_for_on_the_hub(name: str) -> None:
    error = refused(f"hf:{name}")
    assert isinstance(error, UsageError)
    assert "not the name of a dataset" in error.what
    assert "without --source" in (error.fix or "")


def test_files_of_the_hub_are_inputs_and_its_datasets_are_sources() -> None:
    assert refused(None, "hf:org/name").fix == "--source hf:org/name"


def test_a_tokenizer_that_is_not_there_is_not_a_failure_of_the_network() -> None:
    with pytest.raises(UsageError, match="neither a local path nor a hub repository"):
        load_tokenizer("./nowhere")


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
