"""What a process says of its own accord holds no credential, whichever way it is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SECRET = "secretsecretsecret0123456789"
URL = f"https://host/x?X-Amz-Signature={SECRET}"

SAY = {
    "an error nobody catches": "raise RuntimeError(URL)",
    "an error in a thread": """
t = threading.Thread(target=lambda: 1 / 0 if not URL else (_ for _ in ()).throw(OSError(URL)))
t.start(); t.join()""",
    "an error in a finaliser": """
class A:
    def __del__(self): raise RuntimeError(URL)
A()""",
    "a warning": "warnings.warn(URL)",
    "a log line": "logging.getLogger('x').warning('it is %s', URL)",
    "a log line with a wrong format": "logging.getLogger('x').warning('%d', URL)",
    "the traceback of a log line": """
try: raise RuntimeError(URL)
except RuntimeError: logging.getLogger('x').exception('here')""",
}


@pytest.mark.parametrize("how", SAY)
def test_it_is_said_without_the_credential(how: str) -> None:
    program = (
        "import logging, threading, warnings\nfrom olm_data.sinks import guard\nguard(); guard()\n"
        f"logging.basicConfig()\nURL = {URL!r}\n{SAY[how]}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "X-Amz-Signature" in done.stderr  # it was said
    frames = [line for line in done.stderr.split("\n") if "URL = " not in line]
    assert SECRET not in "\n".join(frames)
    assert (done.returncode != 0) == (how == "an error nobody catches")


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


def test_importing_the_package_changes_no_logging_of_its_host() -> None:
    program = (
        "import logging, sys, warnings\nthere = lambda: (\n"
        "  logging.getLogRecordFactory(), sys.excepthook, logging.Handler.handleError)\n"
        "before = there()\nimport olm_data, olm_data.sinks\nassert before == there()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
