"""AUDIT rows U1 and D5: a folder is read whole, and what is not read is named and counted."""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner
from support.reading import read_source
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.tools import PASSED_REASONS, Tools
from olm_data.errors import InputError
from olm_data.sources import resolve_source
from olm_data.stats.count import collect
from olm_data.stats.text import stats_lines


def passed(*arguments: Any) -> dict[str, set[str]]:
    """Return reason -> names of what is not read."""
    found: dict[str, set[str]] = {}
    for item in resolve_source(list(map(str, arguments))).passed:
        found.setdefault(item.reason, set()).add(item.path)
    return found


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
    for name in ("README.md", "LICENSE", "sub/LICENSE.txt", "x.bin", "sub/y.pdf", ".hidden.txt"):
        (folder / name).write_text("not read")
    (folder / "empty.jsonl").touch()
    (folder / "sub" / ".git" / "z.jsonl").write_text("not read")
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    return folder


def test_u1_a_mixed_folder_is_read_whole_and_the_rest_is_named_with_its_reason(
    mixed: Path,
) -> None:
    read = read_source(mixed)
    assert sorted(read.texts) == ["a line", "a row", "a text", "a zstd line", "notes are text"]
    assert passed(mixed) == {
        "about": {"mixed/README.md", "mixed/LICENSE", "mixed/sub/LICENSE.txt"},
        "format": {"mixed/x.bin", "mixed/sub/y.pdf"},
        "hidden": {"mixed/.hidden.txt", "mixed/sub/.git/"},
        "empty": {"empty.jsonl"},
        "link": {"mixed/link/"},
        "special": {"mixed/pipe.jsonl", "mixed/socket"},
    }


def test_u1_one_jsonl_among_thirty_texts_does_not_hide_them(tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"{n:02d}.txt").write_text(f"text {n}")
    write_jsonl(tmp_path / "one.jsonl", ["a line"])
    assert len(read_source(tmp_path).texts) == 31
    assert passed(tmp_path) == {}


def test_u1_a_pattern_counts_what_it_matches_and_does_not_read(
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


def test_u1_a_prefix_on_s3_is_read_as_the_folder_is(mixed: Path, s3: dict[str, str]) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=s3["endpoint_url"])
    for path in sorted(mixed.rglob("*")):
        if path.is_file():
            key = f"u1/{path.relative_to(mixed.parent)}"
            client.put_object(Bucket=s3["bucket"], Key=key, Body=path.read_bytes())
    here, there = passed(mixed), passed(f"s3://{s3['bucket']}/u1/mixed")
    for reason in ("about", "format", "empty"):
        assert there[reason] == here[reason]
    assert there["hidden"] == {"mixed/.hidden.txt", "mixed/sub/.git/z.jsonl"}
    matched = passed(f"s3://{s3['bucket']}/u1/mixed/*")
    assert matched["format"] == {"mixed/LICENSE", "mixed/x.bin"}


def test_u1_a_folder_that_may_not_be_read_is_an_error(
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


def test_u1_a_pipe_as_an_input_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="a pipe, a socket or a device"):
        resolve_source([str(tmp_path / "pipe.jsonl")])


def test_u1_the_result_the_manifest_and_stats_say_what_was_not_read(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts(20))
    alone = make_dataset([folder], tiny_tokenizer, tmp_path / "alone")
    for n in range(25):
        (folder / f"{n:02d}.pdf").touch()
    (folder / "forged\n1 document\x1b[31m.bin").touch()
    log = io.StringIO()
    done = make_dataset([folder], tiny_tokenizer, tmp_path / "out", log=log)
    assert done.manifest.digest == alone.manifest.digest  # what is not read decides no byte
    counted = done.manifest.tools.passed_over
    assert counted["format"].count == 26
    assert len(counted["format"].names) == 20
    assert "not read: 26 format" in log.getvalue()
    assert "\x1b" not in log.getvalue()
    stats = collect(str(tmp_path / "out"))
    assert stats.to_json()["passed_over"]["format"]["count"] == 26
    assert any("26 format" in line for line in stats_lines(stats, 200))


def test_u1_strict_inputs_refuses_what_would_not_be_read(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts(5))
    words = ["tokenize", str(folder), "--tokenizer", str(tiny_tokenizer), "--workers", "1"]
    words += ["--output", str(tmp_path / "out"), "--strict-inputs", "--dry-run"]
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
def test_u1_a_strangers_count_is_no_error(text: str) -> None:
    assert Tools.of({"passed_over": text}).passed_over == {}


def test_u1_counts_of_unknown_reasons_are_left_out() -> None:
    one = {"count": 1, "names": ["a"]}
    counts = json.dumps({"format": one, "forged\x1b": one})
    found = Tools.of({"passed_over": counts}).passed_over
    assert list(found) == ["format"]
    assert set(found) <= set(PASSED_REASONS)
