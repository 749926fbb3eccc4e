"""What a process says of its own accord holds no credential, whichever way it is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


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
