"""The hub through its own client: addresses, files, commits, and errors that say what to type."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import errors as hub
from support.command import WITH_TESTS, environment
from support.hub_stub import COMMIT, HubStub

from olm_data.errors import ConflictError, InputError, OlmError, StorageError, UsageError
from olm_data.storage.hub import HubFile, Repository, explained, is_commit

ASK = """
import sys
from olm_data.errors import OlmError
from olm_data.storage.hub import Repository, hub_file
try:
    commit = lambda name: Repository("dataset", name).required_commit()
    print({"file": hub_file, "commit": commit}[sys.argv[1]](*sys.argv[2:]))
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


@pytest.mark.parametrize(
    ("address", "kind", "name", "revision"),
    [
        ("hf://datasets/lab/books", "dataset", "lab/books", None),
        ("hf://datasets/lab/books/", "dataset", "lab/books", None),
        ("hf://lab/model@v1.0", "model", "lab/model", "v1.0"),
        ("hf://lab/model@refs/pr/1", "model", "lab/model", "refs/pr/1"),
    ],
)
def test_addresses(address: str, kind: str, name: str, revision: str | None) -> None:
    found = Repository.parse(address)
    assert (found.kind, found.name, found.revision) == (kind, name, revision)
    assert found.address == address.rstrip("/")


@pytest.mark.parametrize(
    "address",
    [
        *("lab/model", "hf://model", "hf://datasets/books", "hf://lab/model/file"),
        *("hf://../x", "hf://a/b@"),
    ],
)
def test_what_names_no_repository_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        Repository.parse(address)


def test_a_file_is_compared_by_the_digest_that_the_hub_knows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"of the hub")
    sha256 = hashlib.sha256(b"of the hub").hexdigest()
    oid = hashlib.sha1(b"blob 10\0of the hub").hexdigest()
    assert HubFile(10, sha256, "").is_at(path)
    assert HubFile(10, "", oid).is_at(path)
    assert not HubFile(11, sha256, oid).is_at(path)
    assert not HubFile(10, "0" * 64, oid).is_at(path)
    assert not HubFile(10, "", "0" * 40).is_at(path)
    assert not HubFile(10, sha256, "").is_at(tmp_path / "none")


def test_commits() -> None:
    assert is_commit("0" * 40)
    assert not is_commit("main")
    assert not is_commit(None)


class _Response:
    request = None

    def __init__(self, status: int) -> None:
        self.status_code, self.headers = status, dict[str, str]()


def answer(kind: type[hub.HfHubHTTPError], status: int) -> Exception:
    return kind("said", response=_Response(status), server_message="hf_" + "x" * 30)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (answer(hub.GatedRepoError, 403), UsageError, "terms"),
        (answer(hub.RevisionNotFoundError, 404), InputError, "no such revision"),
        (answer(hub.RepositoryNotFoundError, 404), InputError, "no such dataset"),
        (answer(hub.HfHubHTTPError, 403), StorageError, "refuses this user"),
        (answer(hub.HfHubHTTPError, 412), ConflictError, "in the meantime"),
        (answer(hub.HfHubHTTPError, 500), StorageError, "the hub answered 500"),
        (hub.OfflineModeIsEnabled("offline"), StorageError, "offline"),
        (hub.HFValidationError("a--b"), UsageError, "name of a repository"),
        (ConnectionError("refused"), StorageError, "cannot be reached"),
        (RuntimeError("Error while uploading"), StorageError, "client stopped"),
    ],
)
def test_errors(error: Exception, kind: type[OlmError], said: str) -> None:
    found = explained(error, "hf://datasets/lab/books", "dataset")
    assert type(found) is kind
    assert said in str(found)
    assert "hf_x" not in str(found)


def test_what_an_upload_failed_of_is_told_and_a_defect_is_none() -> None:
    error = RuntimeError("Error while uploading 'x' to the Hub.")
    error.__cause__ = answer(hub.HfHubHTTPError, 403)
    assert "refuses this user" in str(explained(error, "hf://lab/model", "model"))
    assert explained(KeyError("x"), "hf://lab/model", "model") is None
