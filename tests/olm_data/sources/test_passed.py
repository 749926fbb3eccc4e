"""What is passed over among the inputs is said in every place, and can be refused."""

from __future__ import annotations

import io
import json

import pytest
from click.testing import CliRunner
from support.project import Project
from support.tokenizing import texts, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.tools import PASSED_REASONS, Tools
from olm_data.errors import InputError
from olm_data.extensions.stats.count import collect


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
