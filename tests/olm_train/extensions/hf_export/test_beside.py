"""An export in a process of its own: its answer, its errors, and its end with its parent's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from support.hf_exports import OLMO2, receipt_of, trained
from support.polling import wait_until

from olm_train.extensions.hf_export.beside import Answer, Beside, Order
from olm_train.extensions.hf_export.job import Options

pytestmark = pytest.mark.slow  # processes that import torch


@dataclass
class Places:
    checkpoint: str
    folder: Path

    def order(self, name: str, checkpoint: str | None = None) -> Order:
        return Order(
            checkpoint=checkpoint or self.checkpoint,
            output=str(self.folder / name),
            options=Options(dtype="float32", shard_bytes=30_000, check="files"),
        )


@pytest.fixture(scope="module")
def places(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("beside")
    return Places(trained(tiny_mixture, folder / "run", OLMO2).folder, folder)


def waited(child: Beside) -> Answer:
    found = wait_until(child.answer, "an answer", seconds=600)
    assert found is not None
    return found


def test_a_child_exports_or_says_why_not(places: Places) -> None:
    log = places.folder / "log"
    assert waited(Beside(places.order("good"), log)).says == "Olmo2ForCausalLM"
    assert receipt_of(places.folder / "good").step == 2
    nowhere = waited(Beside(places.order("bad", str(places.folder / "nowhere")), log))
    assert "has no manifest" in nowhere.failed
    assert not (places.folder / "bad").exists()


def test_a_child_that_is_ended_leaves_no_folder(places: Places) -> None:
    child = Beside(places.order("ended"), places.folder / "log")
    child.end()
    assert not (places.folder / "ended").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child.process_id, 0)


def test_a_child_ends_with_its_parent(places: Places) -> None:
    script = (
        "import os, sys, msgspec\n"
        "from pathlib import Path\n"
        "from olm_train.extensions.hf_export.beside import Beside, Order\n"
        "order = msgspec.json.decode(sys.argv[1].encode(), type=Order)\n"
        "child = Beside(order, Path(sys.argv[2]))\n"
        "os.kill(child.process_id, 19)\n"  # it stands still, so that it cannot be done before
        "print(child.process_id, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    order = msgspec.json.encode(places.order("orphan")).decode()
    arguments = [order, str(places.folder / "log")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, timeout=300
    )
    pid = int(done.stdout)
    os.kill(pid, 18)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "its end", seconds=600)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
