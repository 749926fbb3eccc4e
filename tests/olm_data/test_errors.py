"""What a process says: the parts of a message, what every sink makes of it, and closed streams."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import (
    ConflictError,
    InputError,
    OlmError,
    ResourceError,
    StorageError,
    UsageError,
    ValidationError,
    printable,
    quoted,
    refuse_secrets,
    shown,
    suggest,
    typed,
)

KINDS = (UsageError, ValidationError, InputError, ResourceError, StorageError, ConflictError)


TEXT = st.text(max_size=60)


@given(st.sampled_from(KINDS), TEXT, st.none() | TEXT, st.none() | TEXT, st.none() | TEXT)
def test_an_error_is_the_same_in_another_process(
    kind: type[OlmError], what: str, where: str | None, why: str | None, fix: str | None
) -> None:
    error = kind(what, where=where, why=why, fix=fix)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.exit_code) == (kind, str(error), error.exit_code)
    assert (again.what, again.where, again.why, again.fix) == (
        error.what, error.where, error.why, error.fix,
    )  # fmt: skip


def test_each_kind_has_an_exit_code_of_its_own() -> None:
    assert [kind.exit_code for kind in KINDS] == [2, 3, 4, 5, 6, 7]
    assert OlmError.exit_code == 1


@given(TEXT, TEXT)
def test_a_part_takes_one_line_whatever_it_holds(what: str, where: str) -> None:
    lines = str(UsageError(f"a{what}", where=f"b{where}")).split("\n")
    assert [line[:9] for line in lines if not line.startswith("    ")][1:] in (["  where: "], [])


def test_an_indented_list_keeps_its_lines() -> None:
    assert str(UsageError("two files:\n    a\n    b\nc")) == "two files:\n    a\n    b c"


@given(TEXT)
def test_nothing_that_is_shown_acts_on_a_terminal(text: str) -> None:
    assert printable(text).isprintable()
    assert all(line.isprintable() for line in shown(text).split("\n"))
    assert printable(printable(text)) == printable(text)


@given(TEXT, TEXT)
def test_a_name_of_anybody_can_be_where_an_error_is_or_why(where: str, why: str) -> None:
    error = UsageError("wrong", where=where, why=why)
    assert (error.where, error.why) == (printable(where), printable(why))


@pytest.mark.parametrize(
    ("name", "known", "says"),
    [
        ("tokenise", ["tokenize", "mix"], "did you mean 'tokenize'?"),
        ("MIX", ["tokenize", "mix"], "did you mean 'mix'?"),
        ("xyz", ["b", "a"], "known: a, b"),
        ("xyz", [], "nothing is known here"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(name: str, known: list[str], says: str) -> None:
    assert suggest(name, known) == says


def test_values_are_shown_as_they_were_given_and_no_longer_than_a_line() -> None:
    assert quoted("a\nb") == r"'a\nb'"
    assert len(quoted("x" * 1000)) == 82
    assert (quoted(3), quoted(None)) == ("3", "None")
    assert quoted(Fraction(1, 4)) == "0.25"
    assert quoted(Fraction(-(10**400))) == "-1e400 or more"
    assert quoted(Fraction(10**400)) == "1e400 or more"
    assert (quoted(Fraction(1, 3)), quoted(Fraction(1, 10**400))) == ("0.333333", "0")
    assert typed("a b") == "'a b'"


@pytest.mark.parametrize("url", ["s3://bucket/x", "/a/b@c", "hf://datasets/a/b"])
def test_a_plain_url_is_taken(url: str) -> None:
    refuse_secrets(url)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_on_a_full_disk_is_one_line_and_no_traceback() -> None:
    program = (
        "import logging\nfrom olm_data.sinks import guard\nguard()\n"
        "log = logging.getLogger('wandb.sdk')\nlog.addHandler(logging.FileHandler('/dev/full'))\n"
        "log.warning('first'); log.warning('second %d', 'wrong')\nlog.warning('third')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    full = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    assert full == [
        "warning: wandb could not write its log: OSError: [Errno 28] No space left on device"
    ]
    assert "Traceback" not in done.stderr


# Standard streams that are closed, full or gone; whole commands: FAULTS row 80.
GUARDED = "from olm_data.sinks import *\nfrom olm_data.sinks import OutputLost\nimport os, sys\n"


PROGRAM = GUARDED + "secure_streams()\n"


def run(program: str, **streams: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], text=True, **streams)  # type: ignore[call-overload,no-any-return]


def test_what_cannot_be_written_to_standard_output_is_an_error() -> None:
    program = PROGRAM + (
        "try:\n    print('result'); sys.stdout.flush()\n"
        "except OutputLost as error:\n"
        "    sys.stderr.write(error.what); drop_results(); sys.exit(5)\n"
    )
    with open("/dev/full", "wb") as full:
        done = run(program, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 5
    assert done.stderr == "standard output cannot be written: No space left on device"


def test_a_reader_that_has_seen_enough_ends_nothing() -> None:
    program = PROGRAM + (
        "for n in range(100_000): print(n)\nsys.stdout.flush()\nsys.stderr.write('worked on')\n"
    )
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    os.close(read)
    assert (process.communicate()[1], process.returncode) == ("worked on", 0)


def test_remarks_that_cannot_be_written_end_nothing() -> None:
    with open("/dev/full", "wb") as full:
        done = run(
            PROGRAM + "print('remark', file=sys.stderr)\nprint('result')",
            stdout=subprocess.PIPE,
            stderr=full,
        )
    assert (done.returncode, done.stdout) == (0, "result\n")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    closed = f"import os\nfor n in (0, 1, 2): os.close(n)\n{PROGRAM}"
    path = tmp_path / "data"
    done = run(
        closed + f"file = open({str(path)!r}, 'w')\nassert file.fileno() > 2\n"
        "print('result'); sys.stdout.flush()\nfile.write('data')\n"
    )
    assert done.returncode == 0
    assert path.read_text() == "data"


def test_a_deleted_working_folder_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"{GUARDED}from pathlib import Path\nos.rmdir(os.getcwd())\nsecure_streams()"
    done = run(program, cwd=gone, stderr=subprocess.PIPE)
    assert "the working folder was deleted" in done.stderr


def test_streams_that_are_no_files_stay_as_they_are() -> None:
    program = (
        GUARDED + "import io\nmine = sys.stdout = io.StringIO()\nsecure_streams()\n"
        "assert sys.stdout is mine\n"
    )
    assert run(program).returncode == 0


def test_a_crash_in_native_code_says_where() -> None:
    crash = "import signal\ndef inner(): os.kill(os.getpid(), signal.SIGSEGV)\ninner()\n"
    done = run(PROGRAM + crash, stderr=subprocess.PIPE)
    assert done.returncode == -11
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "in inner" in done.stderr
