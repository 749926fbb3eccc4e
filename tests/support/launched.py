"""A user's project in git with a launch.yaml, and the command that launches it.

write_project(folder, lock) -> train.yaml, launch.yaml, said.py (committed), run into folder/run
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from support.runs import config_values, environment

SAID = """\
import sys
import time
from dataclasses import dataclass

from olm_train import Callback


@dataclass(kw_only=True)
class Said(Callback):
    wait: float = 0.0

    def pre_train(self):
        print("code one", file=sys.stderr, flush=True)

    def post_step(self, *_):
        time.sleep(self.wait)
"""


def git(folder: Path, *words: str) -> None:
    """Run git as somebody."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def write_project(folder: Path, lock: Path, **launch: Any) -> Path:
    """Write and commit a project whose callback says which code runs; return its launch.yaml."""
    folder.mkdir(parents=True)
    train = config_values(lock, folder / "run")
    train["trainer"]["callbacks"]["said"] = {"name": "said:Said"}
    del train["trainer"]["callbacks"]["lm_evaluator"]
    (folder / "train.yaml").write_text(yaml.safe_dump(train))
    (folder / "said.py").write_text(SAID)
    small = {"disk_gb": 0, "shm_gb": 0, "open_files": 1, "megabytes": 1, "clock_seconds": 60}
    values = {
        "name": "tiny",
        "train": "train.yaml",
        "snapshots": str(folder.parent / "snapshots"),
        "environment": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        "preflight": small,
    }
    (folder / "launch.yaml").write_text(yaml.safe_dump(values | launch))
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "begin")
    return folder / "launch.yaml"


def launch(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `olm-train launch`."""
    return subprocess.run(
        [sys.executable, "-m", "olm_train", "launch", str(config), *options],
        env=environment(),
        cwd=config.parent,
        capture_output=True,
        text=True,
        timeout=1200,
    )
