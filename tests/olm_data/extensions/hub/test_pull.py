"""`olm-data pull`: a folder that appears whole and verified, or not at all."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from support.command import arguments, environment, olm_data
from support.hub_stub import HubStub
from support.polling import wait_until
from support.tokenizing import digests

from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.extensions.hub.pull import pull
from olm_data.extensions.hub.push import push
from olm_data.extensions.verify.datasets import verify

BOOKS = "hf://datasets/lab/books"


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "pulling" in path.name)


def test_a_dry_run_makes_no_folder_and_what_is_there_already_is_verified_and_left(
    hub: HubStub, books: Path, tmp_path: Path
) -> None:
    done = push(str(books), BOOKS)
    looked = pull(BOOKS, str(tmp_path / "back"), dry_run=True)
    assert (looked.status, looked.commit) == ("would pull", done.commit)
    assert not (tmp_path / "back").exists()
    assert left(tmp_path) == []
    assert pull(BOOKS, str(tmp_path / "back")).files == looked.files
    before = digests(tmp_path / "back")
    hub.requests.clear()
    again = pull(BOOKS, str(tmp_path / "back"))
    assert again.status == "already there"
    assert digests(tmp_path / "back") == before
    assert not [asked for asked in hub.requests if ".npy" in asked]
    assert left(tmp_path) == []


def test_an_output_with_something_else_is_refused_and_stays(
    hub: HubStub, books: Path, tmp_path: Path
) -> None:
    push(str(books), BOOKS)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "mine.txt").write_text("mine")
    with pytest.raises(ConflictError, match="something else"):
        pull(BOOKS, str(tmp_path / "back"))
    assert digests(tmp_path / "back").keys() == {"mine.txt"}
    assert left(tmp_path) == []


def test_a_dataset_that_was_damaged_on_the_hub_is_not_put_in_place(
    hub: HubStub, books: Path, tmp_path: Path
) -> None:
    push(str(books), BOOKS)
    shard = next((hub.root / "datasets/lab/books").glob("*.tokens.npy"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    for path in hub.root.rglob(shard.name):  # whoever could write to the hub's disk
        path.unlink()
        path.write_bytes(data)
    with pytest.raises(ValidationError, match="damaged"):
        pull(BOOKS, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_missing_part_is_named(hub: HubStub, books: Path, tmp_path: Path) -> None:
    push(str(books), BOOKS)
    lines = [
        {"key": "header", "value": {"summary": "x"}},
        {"key": "deletedFile", "value": {"path": "shard-00001.ends.npy"}},
    ]
    body = "\n".join(map(json.dumps, lines)).encode()
    hub.answer("POST", "/api/datasets/lab/books/commit/main", body)
    with pytest.raises(ValidationError, match=r"1 files .* shard-00001\.ends\.npy"):
        pull(BOOKS, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("address", "output", "said"),
    [
        (BOOKS, "s3://bucket/back", "local folder"),
        (BOOKS, "/", "root"),
        (f"{BOOKS}/shard-00000.json", "back", "no address"),
    ],
)
def test_addresses_and_outputs_that_cannot_be(address: str, output: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        pull(address, output)


def test_a_client_that_is_told_to_stay_offline_says_so(
    hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = hub.environment(tmp_path / "home") | {"HF_HUB_OFFLINE": "1"}
    said = olm_data("pull", BOOKS, tmp_path / "back", extra=extra)
    assert said.returncode == 6, said.stderr
    assert "unset HF_HUB_OFFLINE" in said.stderr


@pytest.mark.slow
def test_a_killed_pull_goes_on(hub: HubStub, books: Path, tmp_path: Path) -> None:
    done = push(str(books), BOOKS)
    process: list[subprocess.Popen[bytes]] = []
    real = hub.answer

    def kill(method: str, path: str, body: bytes, authorization: str = "") -> object:
        if method == "GET" and "shard-00003.tokens" in path and process:
            wait_until((tmp_path / ".back.pulling/manifest.json").exists, "a file to keep")
            process[0].send_signal(signal.SIGKILL)
        return real(method, path, body, authorization)

    hub.answer = kill  # type: ignore[method-assign]
    extra = hub.environment(tmp_path / "home")
    command = arguments("pull", BOOKS, tmp_path / "back")
    with subprocess.Popen(command, env=environment(extra), stderr=subprocess.DEVNULL) as running:
        process.append(running)
        assert running.wait(300) == -signal.SIGKILL
    process.clear()
    assert not (tmp_path / "back").exists()
    again = olm_data("pull", BOOKS, tmp_path / "back", "--json", extra=extra)
    assert again.returncode == 0, again.stderr
    said = json.loads(again.stdout)
    assert (said["commit"], said["digest"]) == (done.commit, done.digest)
    assert said["kept"] > 0
    assert verify(str(tmp_path / "back")).ok
    assert left(tmp_path) == []


def test_a_repository_without_a_dataset(hub: HubStub, tmp_path: Path) -> None:
    (hub.root / "datasets/lab/texts").mkdir(parents=True)
    (hub.root / "datasets/lab/texts/a.txt").write_text("text")
    with pytest.raises(InputError, match="no dataset in this repository"):
        pull("hf://datasets/lab/texts", str(tmp_path / "back"))
