"""Single files of the hub through its own client, against a local hub; commands: end_to_end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.command import WITH_TESTS, environment
from support.hub_stub import COMMIT, HubStub

ASK = """
import sys
from olm_data.errors import OlmError
from olm_data.storage.hub import dataset_commit, hub_file
try:
    print({"file": hub_file, "commit": dataset_commit}[sys.argv[1]](*sys.argv[2:]))
except OlmError as error:
    print(type(error).__name__, str(error))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for kind, name in (("models", "lab/model"), ("datasets", "lab/texts")):
        (tmp_path / "hub" / kind / name).mkdir(parents=True)
        (tmp_path / "hub" / kind / name / "file.txt").write_text("of the hub")
    return tmp_path / "hub"


def ask(known: dict[str, str], *arguments: str) -> str:
    """Ask in a process of its own: the hub's client reads its address when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, *arguments],
        env={"PATH": "/usr/bin:/bin", **known},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_files_and_commits_are_those_of_the_hub(root: Path, tmp_path: Path) -> None:
    with HubStub(root).running() as stub:
        known = stub.environment(tmp_path / "home")
        assert ask(known, "file", "lab/model", "file.txt") == "b'of the hub'"
        assert ask(known, "file", "lab/model", "none.txt") == "None"
        assert ask(known, "file", "lab/none", "file.txt") == "None"
        assert ask(known, "commit", "lab/texts") == COMMIT
        said = ask(known, "commit", "lab/none")
    assert said.startswith("InputError there is no such dataset on the hub")


def test_a_hub_that_does_not_answer_is_named_and_no_token_is(root: Path, tmp_path: Path) -> None:
    stub = HubStub(root)
    with stub.running():
        known = stub.environment(tmp_path / "home")
    token = "hf_abcdefghijklmnopqrstuvwxyz012345"
    said = ask({**known, "HF_TOKEN": token}, "commit", "lab/texts")
    assert said.startswith("StorageError the hub cannot be reached")
    assert "host 127.0.0.1" in said
    assert token not in said


THREADS = """
import threading
from olm_data.storage.store import Store
from support.racing import restless

store, sizes, begin = Store("hf://datasets/lab/texts"), [], threading.Barrier(8)

def ask(number):
    begin.wait()
    sizes.append((store.size(f"folder/{number}.txt"), store.read(f"folder/{number}.txt")))

threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
with restless():
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
print(sorted(sizes) == [(1, str(number).encode()) for number in range(8)])
"""


def test_threads_that_ask_for_files_of_a_folder_list_it_once(root: Path, tmp_path: Path) -> None:
    folder = root / "datasets/lab/texts/folder"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(str(number))
    with HubStub(root).running() as stub:
        known = stub.environment(tmp_path / "home")
        done = subprocess.run(
            [sys.executable, "-c", THREADS],
            env=environment(WITH_TESTS | known),
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert len([line for line in stub.requests if "/tree/" in line]) == 1
