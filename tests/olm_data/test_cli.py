"""Every command takes -o, -q, -v; mistakes get one style and the nearest name; how one ends."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from support.command import Olm, Said, inside, python
from support.tokenizing import texts, write_jsonl

from olm_data.cli import cli
from olm_data.command import Command
from olm_data.extensions.stats import command as stats


def test_help_names_each_command_with_a_whole_sentence(olm: Olm) -> None:
    text = olm("--help").stdout
    for heading, known in cli.summaries().items():
        assert f"{heading}:" in text
        for name, summary in known.items():
            assert (f"  {name} " in text) == (name not in cli.internal)
            assert name in cli.internal or summary in " ".join(text.split())
            assert summary.endswith(".")


@pytest.mark.parametrize(
    ("typed", "error", "fix"),
    [
        (["tokenise", "x"], "there is no command 'tokenise'", "did you mean 'tokenize'?"),
        (["mixx"], "there is no command 'mixx'", "did you mean 'mix'?"),
        (["verify", "--smaple", "1%"], "no such option '--smaple'", "olm-data verify --help"),
        (["verify"], "missing argument", "olm-data verify --help"),
        (["report", "a", "--run"], "requires an argument", "olm-data report --help"),
        (["--versoin"], "no such option '--versoin'", "olm-data --help"),
    ],
)
def test_a_mistyped_command_line_has_one_style_and_a_way_out(
    typed: list[str], error: str, fix: str, olm: Olm
) -> None:
    said = olm(*typed)
    assert said.returncode == 2
    assert said.stderr.startswith("error: ")
    first, second = said.stderr.splitlines()[:2]
    assert error in first
    assert second.startswith("  fix: ")
    assert fix in second
    assert "Usage:" not in said.stderr


def test_a_mistyped_command_is_an_event_with_json(olm: Olm) -> None:
    event = json.loads(olm("tokenise", "x", "--json").stdout.splitlines()[-1])
    assert (event["event"], event["exit_code"]) == ("error", 2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tokenize", "a.jsonl", "--tokenizer", "", "-o", "out"], '--tokenizer ""'),
        (["tokenize", "a.jsonl", "--tokenizer=", "-o", "out"], '--tokenizer=""'),
        (["tokenize", "", "--tokenizer", "gpt2", "-o", "out"], 'tokenize ""'),
        (["import", "", "--tokenizer", "gpt2", "-o", "out"], 'import ""'),
        (["mix", "m.yaml", "-o", ""], '-o ""'),
        (["verify", ""], 'verify ""'),
    ],
)
def test_an_empty_argument_is_named_and_refused(
    words: list[str], named: str, here: Path, olm: Olm
) -> None:
    write_jsonl(here / "a.jsonl", texts(3))
    said = olm(*words)
    assert said.returncode == 2
    assert f"where: {named}\n" in said.stderr
    assert [path.name for path in here.iterdir()] == ["a.jsonl"]


def test_white_space_may_be_a_separator(tmp_path: Path, tiny_tokenizer: Path, olm: Olm) -> None:
    (tmp_path / "a.txt").write_text("one two")
    words = ["--tokenizer", tiny_tokenizer, "-o", tmp_path / "out", "--dry-run"]
    said = olm("tokenize", tmp_path / "a.txt", "--separator", " ", *words)
    assert said.returncode == 0, said.stderr


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
        (MemoryError(), 5, "--workers, where the command has it"),
    ],
)
def test_an_error_that_no_module_foresaw_says_what_to_do(
    error: Exception, exit_code: int, part: str, monkeypatch: pytest.MonkeyPatch, olm: Olm
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(stats.stats, "callback", fail)
    said = olm("stats", "anything")
    assert (said.returncode, "Traceback" in said.stderr) == (exit_code, False)
    assert part in said.stderr
    assert len(said.stderr) < 1000


@pytest.mark.parametrize(
    "command", ["verify", "stats", "status", "show row", "doctor", "import-mix"]
)
def test_names_too_long_or_without_end_are_answered_by_check_the_path(
    command: str, here: Path, olm: Olm
) -> None:
    (here / "loop").symlink_to("loop")
    for place in ("x" * 5000, "loop"):
        said = olm(*command.split(), place)
        if command == "doctor" and place == "loop":
            assert "Traceback" not in said.stderr
            continue
        assert said.returncode in (2, 4, 5), said.stderr
        assert "run the same command again" not in said.stderr


def tokenize(capsys: pytest.CaptureFixture[str], folder: Path, tokenizer: Path, out: str) -> Said:
    text = write_jsonl(folder / "a.jsonl", texts(3))
    return inside(capsys, "tokenize", text, "--tokenizer", tokenizer, "-o", out, "--workers", "1")


def test_names_that_are_not_utf8_are_refused_or_shown_escaped(
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


@pytest.mark.parametrize("code", [None, 0, 3, "words"])
def test_a_command_ends_after_all_exit_functions_and_before_its_modules_are_taken_apart(
    tmp_path: Path, code: object
) -> None:
    done = python(
        tmp_path,
        f"""
        import atexit, sys, threading, time
        from olm_data.command import run_process

        class Torn:
            def __del__(self):
                print("torn apart", file=sys.stderr)

        torn = Torn()
        torn.itself = torn

        def command():
            atexit.register(print, "exit function", end="")  # stays in the buffer
            threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
            raise SystemExit({code!r})

        run_process(command)
        """,
    )
    assert done.returncode == {None: 0, 0: 0, 3: 3, "words": 1}[code]
    assert done.stdout == "thread\nexit function"
    assert done.stderr == ("words\n" if code == "words" else "")


def test_a_defect_still_ends_by_its_traceback_and_exit_code_1(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        """
        from olm_data.command import run_process

        def command():
            raise RuntimeError("defect")

        run_process(command)
        """,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: defect\n")


@click.command(cls=Command)
def fill() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/runs/first")


def test_an_error_of_the_machine_is_a_message_and_its_traceback_is_for_debug() -> None:
    done = CliRunner().invoke(fill)
    assert done.exit_code == 5
    assert done.stderr.startswith("error: no space left to write")
    assert "/runs/first" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in CliRunner().invoke(fill, ["--debug"]).stderr
