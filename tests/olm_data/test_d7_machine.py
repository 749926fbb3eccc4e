"""AUDIT row D7: what a machine refuses is a message with an exit code, never a traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import Said, inside, olm_data
from support.tokenizing import texts, write_jsonl

from olm_data.commands import stats

NO_TEXT = os.fsdecode(b"\xff")
"""A name that is not UTF-8, as Python has it from the command line."""


@pytest.mark.parametrize(
    ("error", "exit_code", "part"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 5, "ulimit -n"),
        (OSError(errno.EIO, "Input/output error", "/there"), 5, "where: /there"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "y" * 5000), 4, "check the path"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "/l"), 4, "check the path"),
        (PermissionError(errno.EACCES, "Permission denied", "/there"), 5, "not allowed"),
        (MemoryError(), 5, "not enough memory"),
    ],
)
def test_d7_an_error_that_no_module_foresaw_says_what_to_do(
    error: Exception,
    exit_code: int,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(stats.stats, "callback", fail)
    said = inside(capsys, "stats", "anything")
    assert (said.returncode, "Traceback" in said.stderr) == (exit_code, False)
    assert part in said.stderr
    assert len(said.stderr) < 1000


@pytest.mark.parametrize(
    "command", ["verify", "stats", "status", "show row", "doctor", "import-mix"]
)
def test_d7_names_too_long_or_without_end_are_answered_by_check_the_path(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for place in ("x" * 5000, "loop"):
        said = inside(capsys, *command.split(), place)
        if command == "doctor" and place == "loop":
            assert "Traceback" not in said.stderr
            continue
        assert said.returncode in (2, 4, 5), said.stderr
        assert "run the same command again" not in said.stderr


def tokenize(capsys: pytest.CaptureFixture[str], folder: Path, tokenizer: Path, out: str) -> Said:
    text = write_jsonl(folder / "a.jsonl", texts(3))
    return inside(capsys, "tokenize", text, "--tokenizer", tokenizer, "-o", out, "--workers", "1")


def test_d7_names_that_are_not_utf8_are_refused_or_shown_escaped(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tokenize(capsys, tmp_path, tiny_tokenizer, str(tmp_path / f"out{NO_TEXT}"))
    assert (said.returncode, "is not valid UTF-8" in said.stderr) == (2, True)
    named = tmp_path / f"my{NO_TEXT}.json"
    named.write_bytes(tiny_tokenizer.read_bytes())
    said = tokenize(capsys, tmp_path, named, str(tmp_path / "out"))
    assert said.returncode == 0, said.stderr
    wrong = f"x{NO_TEXT}"
    for words in (
        ("document", tmp_path / "out", "--id", wrong),
        ("search", tmp_path / "out", wrong),
    ):
        found = inside(capsys, "show", *words)
        assert (found.returncode, "Traceback" in found.stderr) == (2, False), found.stderr


def test_d7_a_long_name_of_tmpdir_does_not_matter(tmp_path: Path, tiny_tokenizer: Path) -> None:
    folder = tmp_path / ("t" * 120)
    folder.mkdir()
    text = write_jsonl(tmp_path / "a.jsonl", texts(3))
    said = olm_data(
        *("tokenize", text, "--tokenizer", tiny_tokenizer, "-o", tmp_path / "out"),
        extra={"TMPDIR": str(folder)},
    )
    assert (said.returncode, "Traceback" in said.stderr) == (0, False), said.stderr
    assert os.listdir(folder) == []


def test_d7_a_short_tmpdir_keeps_its_sockets(tmp_path: Path) -> None:
    code = (
        "import tempfile; tempfile.tempdir = {0!r}\n"
        "from olm_data.runners.fork_server import short_sockets\n"
        "from multiprocessing.util import get_temp_dir\n"
        "short_sockets(); print(get_temp_dir(), tempfile.gettempdir())"
    )
    for folder, there in ((Path("/tmp"), True), (tmp_path / ("t" * 80), False)):
        folder.mkdir(exist_ok=True)
        words = [sys.executable, "-c", code.format(str(folder))]
        sockets, files = subprocess.check_output(words, text=True).split()
        assert (sockets.startswith(f"{folder}/"), files) == (there, str(folder))
        assert len(sockets) < 70
