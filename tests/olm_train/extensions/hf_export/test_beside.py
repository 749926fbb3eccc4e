"""An export in a process of its own: its answer, its errors, and its end with its parent's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.hf_exports import OLMO2, receipt_of, trained
from support.polling import wait_until

from olm_train.extensions.hf_export.beside import Beside

pytestmark = pytest.mark.slow  # processes that import torch


@dataclass
class Places:
    checkpoint: str
    folder: Path

    def order(self, name: str, checkpoint: str | None = None) -> list[str]:
        output = f"--output={self.folder / name}"
        return [checkpoint or self.checkpoint, "--to=hf", output, "--verify=files"]


@pytest.fixture(scope="module")
def places(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("beside")
    return Places(trained(tiny_mixture, folder / "run", OLMO2).folder, folder)


def waited(child: Beside) -> str:
    ended = wait_until(
        lambda: [why] if (why := child.failed()) is not None else None, "an end", seconds=600
    )
    assert ended is not None
    return ended[0]


def test_a_child_exports_or_says_why_not(places: Places) -> None:
    log = places.folder / "log"
    assert waited(Beside(places.order("good"), log)) == ""
    assert receipt_of(places.folder / "good").step == 2
    assert "there is no such folder" in waited(Beside(places.order("bad", "/nowhere"), log))
    assert not (places.folder / "bad").exists()


def test_a_child_that_is_ended_leaves_no_folder(places: Places) -> None:
    child = Beside(places.order("ended"), places.folder / "log")
    child.end()
    assert not (places.folder / "ended").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child.process_id, 0)


def test_a_child_ends_with_its_parent(places: Places) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from olm_train.extensions.hf_export.beside import Beside\n"
        "child = Beside(sys.argv[2:], Path(sys.argv[1]))\n"
        "os.kill(child.process_id, 19)\n"  # it stands still, so that it cannot be done before
        "print(child.process_id, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    arguments = [str(places.folder / "log"), *places.order("orphan")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, timeout=300
    )
    pid = int(done.stdout)
    os.kill(pid, 18)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "its end", seconds=600)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
