"""AUDIT rows D10 and U12: standard input, read more than once and the same on a rerun."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.project import Project
from support.tokenizing import digests, texts

from olm_data.cli import cli
from olm_data.dataset.manifest import read_manifest
from olm_data.errors import ConflictError, InputError, UsageError
from olm_data.sources.standard_input import spooled
from olm_data.storage import disk
from olm_data.storage.store import Store


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of unfinished work lie in a place of the test's own, so that what stays is seen."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    own = SimpleNamespace(
        mkdtemp=partial(tempfile.mkdtemp, dir=folder), gettempdir=lambda: str(folder)
    )
    monkeypatch.setattr(disk, "tempfile", own)
    return folder


def tokenize(data: bytes, tokenizer: Path, output: Path, *more: str) -> Result:
    words = ["tokenize", "-", "--tokenizer", str(tokenizer), "--output", str(output)]
    return CliRunner().invoke(cli, [*words, "--workers", "1", "--encoder", "hf", *more], input=data)


def test_standard_input_makes_the_documents_of_the_file_and_leaves_nothing_behind(
    temporary: Path, project: Project
) -> None:
    path = project.write("a.jsonl", texts(30))
    of_file = project.make([path], "file")
    done = tokenize(path.read_bytes(), project.tokenizer, project.out)
    assert done.exit_code == 0, done.output
    manifest = read_manifest(Store(project.out))
    assert [shard.sha256["tokens"] for shard in manifest.shards] == [
        shard.sha256["tokens"] for shard in of_file.manifest.shards
    ]
    assert list(temporary.iterdir()) == []
    again = tokenize(path.read_bytes(), project.tokenizer, project.out)
    assert "already complete" in again.output
    other = tokenize(b'{"text": "another"}\n', project.tokenizer, project.out)
    assert isinstance(other.exception, ConflictError)


def test_an_interrupted_run_goes_on_with_the_same_text(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    import olm_data.tokenization.tokenize as run

    data = project.write("a.jsonl", texts(30)).read_bytes()
    assert tokenize(data, project.tokenizer, project / "whole").exit_code == 0

    def killed(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "publish", killed)
        assert tokenize(data, project.tokenizer, project.out).exit_code != 0
    done = tokenize(data, project.tokenizer, project.out)
    assert done.exit_code == 0, done.output
    assert "1 shard kept" in done.output or "finished before" in done.output
    whole, out = digests(project / "whole"), digests(project.out)
    for name in whole:
        assert name == "job.json" or whole[name] == out[name], name


@pytest.mark.parametrize(
    ("form", "data"),
    [("txt", b"a text"), ("csv", b"id,text\n1,a text\n"), ("json", b'[{"text": "a text"}]')],
)
def test_standard_input_has_any_format(form: str, data: bytes, project: Project) -> None:
    done = tokenize(data, project.tokenizer, project.out, "--format", form)
    assert done.exit_code == 0, done.output
    assert read_manifest(Store(project.out)).totals.documents == 1


def test_standard_input_is_added_to_a_dataset(project: Project) -> None:
    path = project.write("a.jsonl", texts(5))
    project.make([path])
    for n in range(2):
        words = ["add", str(project.out), "-", "--workers", "1", "--encoder", "hf"]
        line = json.dumps({"id": str(n), "text": f"text {n}"}).encode() + b"\n"
        done = CliRunner().invoke(cli, words, input=line)
        assert done.exit_code == 0, (done.output, done.exception)
    assert read_manifest(Store(project.out)).totals.documents == 7


@pytest.mark.parametrize(
    ("inputs", "form", "runner", "data", "kind"),
    [
        (("-",), None, "slurm", b"x", UsageError),
        (("-", "a.jsonl"), None, "local", b"x", UsageError),
        (("-",), "docx", "local", b"x", UsageError),
        (("a.jsonl",), "txt", "local", b"x", UsageError),
        (("-",), "txt", "local", b"", InputError),
    ],
)
def test_what_cannot_be_standard_input_is_refused(
    inputs: tuple[str, ...],
    form: str | None,
    runner: str,
    data: bytes,
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(kind), spooled(inputs, form, runner, print):
        pass
