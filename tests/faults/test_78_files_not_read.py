"""FAULTS row 78: files among the inputs that are not read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from click.testing import CliRunner
from support.tokenizing import texts, write_jsonl

from olm_data.cli import cli


def test_78_a_folder_is_read_whole_and_the_rest_is_counted_everywhere(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts(10))
    for n in range(30):
        (folder / f"{n}.txt").write_text(f"text {n}")
    for n in range(3):
        (folder / f"{n}.docx").write_text("not read")
    os.mkfifo(folder / "pipe.txt")
    words = ["tokenize", str(folder), "--tokenizer", str(tiny_tokenizer), "--output", str(out)]
    words += ["--workers", "1", "--encoder", "hf"]
    refused = CliRunner().invoke(cli, [*words, "--strict-inputs"])
    assert refused.exit_code != 0
    assert not out.exists()
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert re.search(r"^documents +40$", done.output, re.M)
    assert "3 format" in done.output
    assert "1 special" in done.output
    counted = json.loads(json.loads((out / "manifest.json").read_bytes())["tools"]["passed_over"])
    assert {reason: found["count"] for reason, found in counted.items()} == {
        "format": 3,
        "special": 1,
    }
    shown = json.loads(CliRunner().invoke(cli, ["stats", str(out), "--json"]).stdout)
    assert shown["passed_over"] == counted
