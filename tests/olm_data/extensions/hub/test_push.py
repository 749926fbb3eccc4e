"""`olm-data push`: verified, whole or not seen as whole, never sent twice, never over another."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.command import Olm, arguments, environment, olm_data
from support.forged import flip
from support.hub_commits import Answer
from support.hub_stub import HubStub
from support.project import Project
from support.tokenizing import digests, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, StorageError, UsageError, ValidationError
from olm_data.extensions.hub.pull import pull
from olm_data.extensions.hub.push import push
from olm_data.extensions.verify.datasets import verify

BOOKS = "hf://datasets/lab/books"


def there(hub: HubStub, repository: str = "datasets/lab/books") -> dict[str, bytes]:
    folder = hub.root / repository
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_dataset_comes_back_byte_for_byte_and_verifies(
    hub: HubStub, books: Path, tmp_path: Path
) -> None:
    done = push(str(books), BOOKS)
    assert (done.status, done.kept) == ("pushed", 0)
    assert "job.json" in done.not_sent
    sent_bytes = "".join(data.decode(errors="replace") for data in there(hub).values())
    assert str(books.parent) not in sent_bytes  # nothing tells of this machine
    assert done.digest == Dataset.open(str(books)).digest
    back = pull(f"{BOOKS}@{done.commit}", str(tmp_path / "back"))
    assert (back.status, back.commit) == ("pulled", done.commit)
    sent = {name for name in digests(books) if name not in done.not_sent}
    assert digests(tmp_path / "back") == {n: d for n, d in digests(books).items() if n in sent}
    assert "validation/manifest.json" in sent
    assert verify(str(tmp_path / "back")).ok


def test_a_dry_run_tells_what_would_be_sent_and_the_second_push_sends_nothing(
    hub: HubStub, books: Path
) -> None:
    looked = push(str(books), BOOKS, dry_run=True)
    assert (looked.status, looked.commit) == ("would push", None)
    assert not (hub.root / "datasets").exists()
    first = push(str(books), BOOKS)
    assert (looked.sent, looked.sent_bytes) == (first.sent, first.sent_bytes)
    uploads, hub.requests[:] = list(hub.commits.uploaded), []
    again = push(str(books), BOOKS)
    assert (again.status, again.commit, again.sent, again.sent_bytes) == (
        "already there",
        first.commit,
        0,
        0,
    )
    assert again.kept == first.sent
    assert hub.commits.uploaded == uploads
    assert not [asked for asked in hub.requests if asked.startswith(("POST", "PUT"))]


def test_a_push_that_fails_leaves_no_manifest_and_the_next_sends_the_rest(
    hub: HubStub, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.extensions.hub.push.COMMIT_FILES", 4)

    def refuse(sha256: str) -> None:
        if len(hub.commits.uploaded) > 5:
            raise Answer(403, "", "quota")

    hub.commits.on_upload = refuse
    with pytest.raises(StorageError, match="refuses this user"):
        push(str(books), BOOKS)
    before = set(hub.commits.uploaded)
    assert before
    assert "manifest.json" not in there(hub)
    with pytest.raises(InputError, match="no dataset"):
        pull(BOOKS, str(tmp_path / "half"))
    assert not (tmp_path / "half").exists()
    hub.commits.on_upload = lambda sha256: None
    done = push(str(books), BOOKS)
    assert done.kept > 0
    assert len(set(hub.commits.uploaded)) == len(hub.commits.uploaded), "nothing goes twice"
    pull(f"{BOOKS}@{done.commit}", str(tmp_path / "back"))


def test_the_manifest_comes_in_the_last_commit(
    hub: HubStub, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.extensions.hub.push.COMMIT_FILES", 4)
    seen: list[bool] = []
    real = hub.commits.post

    def post(path: str, body: bytes, authorization: str) -> object:
        answer = real(path, body, authorization)
        if "/commit/" in path:
            seen.append("manifest.json" in there(hub))
        return answer

    monkeypatch.setattr(hub.commits, "post", post)
    push(str(books), BOOKS)
    assert len(seen) > 2
    assert seen == [False] * (len(seen) - 1) + [True]


def test_a_damaged_dataset_is_not_sent(hub: HubStub, books: Path, tmp_path: Path) -> None:
    shutil.copytree(books, tmp_path / "books")
    shard = next((tmp_path / "books").glob("*.tokens.npy"))
    flip(shard)
    with pytest.raises(ValidationError, match="damaged"):
        push(str(tmp_path / "books"), BOOKS)
    assert not (hub.root / "datasets").exists()


def test_another_dataset_in_the_repository_stays_and_a_later_version_goes_over_an_earlier_one(
    hub: HubStub, books: Path, project: Project
) -> None:
    other = project.write("other.jsonl", texts(20, 900))
    project.make([other], "other", shard_tokens=500)
    push(str(project / "other"), BOOKS)
    before = there(hub)
    with pytest.raises(ConflictError, match="another dataset"):
        push(str(books), BOOKS)
    assert push(str(books), BOOKS, revision="new").status == "pushed"  # a branch of its own
    assert pull(f"{BOOKS}@new", str(project / "new")).digest == Dataset.open(str(books)).digest
    with pytest.raises(InputError, match="no such revision"):
        pull(f"{BOOKS}@none", str(project / "none"))
    with pytest.raises(ConflictError, match="or to a new branch of this one: --revision NAME"):
        push(str(project / "other"), BOOKS, revision="new")
    assert there(hub) == before
    more = project.write("more.jsonl", texts(20, 2000))
    project.add(more, output="other")
    done = push(str(project / "other"), BOOKS)
    assert done.kept > 0
    back = pull(BOOKS, str(project / "back"))
    assert back.digest == project.open("other").digest
    assert verify(str(project / "back")).ok


@pytest.mark.parametrize("when", [pytest.param("verify", marks=pytest.mark.slow), "send"])
def test_inputs_that_are_added_meanwhile_are_not_half_of_what_is_there(
    when: str, hub: HubStub, books: Path, tmp_path: Path
) -> None:
    more = write_jsonl(tmp_path / "more.jsonl", texts(20, 3000))
    data = tmp_path / "data"
    shutil.copytree(books, data)

    def watch(what: str, done: int, total: int) -> None:
        if what == when and Dataset.open(str(data)).manifest.additions == []:
            assert olm_data("add", data, more).returncode == 0

    with pytest.raises(ConflictError, match=r"manifest.json changed while this was running"):
        push(str(data), BOOKS, watch=watch)
    assert "manifest.json" not in there(hub)
    push(str(data), BOOKS)
    assert pull(BOOKS, str(tmp_path / "back")).digest == Dataset.open(str(data)).digest


def test_private_repositories(hub: HubStub, books: Path) -> None:
    push(str(books), BOOKS, private=True)
    push(str(books), BOOKS, private=True, revision="again")
    assert hub.commits.private == {"datasets/lab/books"}
    hub.commits.private.clear()
    with pytest.raises(UsageError, match="public"):
        push(str(books), BOOKS, private=True, revision="other")


def test_a_commit_of_somebody_else_in_between_is_a_conflict(
    hub: HubStub, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interfere(sha256: str) -> None:
        if not hub.commits.uploaded:
            lines = [
                {"key": "header", "value": {"summary": "theirs"}},
                {"key": "file", "value": {"path": "theirs.txt", "content": ""}},
            ]
            body = "\n".join(map(json.dumps, lines)).encode()
            hub.answer("POST", "/api/datasets/lab/books/commit/main", body)

    hub.commits.on_upload = interfere
    with pytest.raises(ConflictError, match="in the meantime"):
        push(str(books), BOOKS)
    assert "manifest.json" not in there(hub)
    hub.commits.on_upload = lambda sha256: None
    done = push(str(books), BOOKS)
    assert "1 other files of the repository are left as they are: theirs.txt" in done.notes


def test_a_file_that_the_repository_ignores_is_found_missing(hub: HubStub, books: Path) -> None:
    folder = hub.root / "datasets/lab/books"
    folder.mkdir(parents=True)
    (folder / ".gitignore").write_text("shard-00000.json\n")
    with pytest.raises(ValidationError, match=r"not those that were sent: shard-00000\.json"):
        push(str(books), BOOKS)


@pytest.mark.parametrize(
    ("address", "options", "said"),
    [
        ("hf://lab/books", {}, "address of a model"),
        ("hf://datasets/lab", {}, "no address"),
        ("s3://bucket/books", {}, "no address"),
        (f"{BOOKS}@main", {}, "branch"),
        (BOOKS, {"revision": "0" * 40}, "branch"),
    ],
)
def test_an_address_that_cannot_be(
    books: Path, address: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        push(str(books), address, **options)  # type: ignore[arg-type]


def test_a_token_is_needed_and_never_shown(
    hub: HubStub, books: Path, monkeypatch: pytest.MonkeyPatch, olm: Olm
) -> None:
    hub.commits.token = "hf_" + "r" * 30
    said = olm("push", books, BOOKS)
    assert said.returncode == 6, said.stderr
    assert "hf auth login" in said.stderr
    wrong = "hf_abcdefghijklmnopqrstuvwxyz012345"
    monkeypatch.setenv("HF_TOKEN", wrong)
    said = olm("push", books, BOOKS)
    assert said.returncode == 6, said.stderr
    assert "refuses this user" in said.stderr
    assert wrong not in said.stderr + said.stdout
    monkeypatch.setenv("HF_TOKEN", hub.commits.token)
    said = olm("push", books, BOOKS)
    assert said.returncode == 0, said.stderr
    assert hub.commits.token not in said.stderr + said.stdout
    assert re.search(
        r"next: olm-data pull hf://datasets/lab/books@[0-9a-f]{40} FOLDER", said.stderr
    )


@pytest.mark.slow
def test_a_killed_push_is_completed_by_the_same_command(
    hub: HubStub, books: Path, tmp_path: Path
) -> None:
    process: list[subprocess.Popen[bytes]] = []

    def kill(sha256: str) -> None:
        if len(hub.commits.uploaded) == 3:
            process[0].send_signal(signal.SIGKILL)
            raise Answer(500, "", "what comes after the kill is not taken")

    hub.commits.on_upload = kill
    extra = hub.environment(tmp_path / "home")
    command = arguments("push", books, BOOKS)
    with subprocess.Popen(command, env=environment(extra), stderr=subprocess.DEVNULL) as running:
        process.append(running)
        assert running.wait(300) == -signal.SIGKILL
    assert "manifest.json" not in there(hub)
    hub.commits.on_upload = lambda sha256: None
    sent = list(hub.commits.uploaded)
    done = olm_data("push", books, BOOKS, extra=extra)
    assert done.returncode == 0, done.stderr
    assert len(set(hub.commits.uploaded)) == len(hub.commits.uploaded) > len(sent)
    assert pull(BOOKS, str(tmp_path / "back")).digest == Dataset.open(str(books)).digest
