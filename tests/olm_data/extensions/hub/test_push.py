"""`olm-data push` and `pull` of datasets: verified, whole or not at all, never sent twice."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from support.command import Olm, olm_data
from support.hub_stub import HubStub
from support.project import Project
from support.tokenizing import digests, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import MANIFEST
from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.extensions.hub.content import Branch
from olm_data.extensions.hub.datasets import Datasets, dataset_card, dataset_parts
from olm_data.extensions.hub.pull import pull
from olm_data.extensions.hub.push import push
from olm_data.extensions.stats.count import collect
from olm_data.extensions.verify.datasets import verify
from olm_data.storage.hub import Repository
from olm_data.storage.store import Store

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
            hub.commit("datasets/lab/books", path="theirs.txt", content="")

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


def test_a_missing_part_is_named(hub: HubStub, books: Path, tmp_path: Path) -> None:
    push(str(books), BOOKS)
    hub.commit("datasets/lab/books", "deletedFile", path="shard-00001.ends.npy")
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


def test_a_repository_without_a_dataset(hub: HubStub, tmp_path: Path) -> None:
    (hub.root / "datasets/lab/texts").mkdir(parents=True)
    (hub.root / "datasets/lab/texts/a.txt").write_text("text")
    with pytest.raises(InputError, match="no dataset in this repository"):
        pull("hf://datasets/lab/texts", str(tmp_path / "back"))


def test_result_on_standard_output_and_the_rest_beside_it(
    hub: HubStub, books: Path, tmp_path: Path, olm: Olm
) -> None:
    looked = olm("push", books, BOOKS, "--dry-run", "--licence", "mit")
    said = olm("push", books, BOOKS, "--licence", "mit")
    again = olm("push", books, BOOKS, "--json")
    back = olm("pull", BOOKS, tmp_path / "back")
    assert looked.returncode == said.returncode == again.returncode == back.returncode == 0
    assert looked.stdout.splitlines()[0].endswith("  would push")
    assert said.stdout.splitlines()[0].endswith("  pushed")
    assert "not sent    job.json\n" in said.stdout
    result = json.loads(again.stdout)
    assert result["status"] == "already there"
    assert f"next: olm-data pull {BOOKS}@{result['commit']} FOLDER" in said.stderr
    assert result["digest"] in back.stdout
    card = (hub.root / "datasets/lab/books/README.md").read_text()
    assert 'license: "mit"' in card


def test_a_file_of_a_branch_is_read_within_its_limit(hub: HubStub, tmp_path: Path) -> None:
    (hub.root / "models/lab/first").mkdir(parents=True)
    (hub.root / "models/lab/first/a.txt").write_text("text")
    place = Repository.parse("hf://lab/first")
    head = place.required_commit()
    branch = Branch(place, head, place.files(head), tmp_path)
    assert branch.read("a.txt", 4) == b"text"
    assert branch.read("b.txt", 4) is None
    with pytest.raises(ValidationError, match="at most 3"):
        branch.read("a.txt", 3)
    assert Branch(place, None, {}, tmp_path).read("a.txt", 4) is None


def quiet(what: str, done: int, total: int) -> None:
    pass


def test_a_dataset_is_what_its_manifest_names(books: Path, tmp_path: Path) -> None:
    kind, store = Datasets(), Store(str(books))
    content = kind.read(store, store.exists)
    assert content.digest == Dataset.open(str(books)).digest
    assert content.last == ("manifest.json",)
    assert {"manifest.json", "tokenizer.json", "validation/manifest.json"} <= content.parts.keys()
    assert kind.damage(content, quiet) is None
    shutil.copytree(books, tmp_path / "books")
    (tmp_path / "books/shard-00000.ends.npy").write_bytes(b"")
    copy = Store(str(tmp_path / "books"))
    damage = kind.damage(kind.read(copy, copy.exists), quiet)
    assert "shard-00000" in damage


def test_naming_files_and_targets(books: Path, tmp_path: Path) -> None:
    kind = Datasets()
    assert kind.is_naming("validation/plan.json")
    assert not kind.is_naming("shard-00000.json")
    assert kind.target(f"{books}/manifest.json") == str(books)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"hf://ORG/NAME"):
        kind.target(str(tmp_path))
    empty = Store(str(tmp_path))
    with pytest.raises(InputError):
        kind.read(empty, empty.exists)


def test_the_parts_are_a_whole_dataset_and_each_is_needed(books: Path, tmp_path: Path) -> None:
    store = Store(str(books))
    parts = {**dataset_parts(store, store.exists), MANIFEST: ""}
    assert not {name for name in parts if name.startswith(("run/", "quarantine/", "."))}
    for name in parts:
        place = tmp_path / "copy" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(books / name, place)
    assert verify(str(tmp_path / "copy")).ok
    for name in sorted(parts.keys() - {MANIFEST}):
        (tmp_path / "copy" / name).rename(tmp_path / "aside")
        assert not verify(str(tmp_path / "copy")).ok, name
        (tmp_path / "aside").rename(tmp_path / "copy" / name)


def test_digests_are_those_of_the_manifest(books: Path) -> None:
    store = Store(str(books))
    parts = dataset_parts(store, store.exists)
    known = {name: sha256 for name, sha256 in parts.items() if sha256}
    assert {"tokenizer.json", "shard-00000.tokens.npy", "validation/tokenizer.json"} <= known.keys()
    assert {name: store.sha256(name) for name in known} == known


def card(books: Path, before: str | None, licence: str | None = None) -> str | None:
    return dataset_card(
        before,
        manifest=Dataset.open(str(books)).manifest,
        stats=collect(str(books)),
        address=BOOKS,
        licence=licence,
    )


def test_a_new_card_says_digests_counts_sources_and_licence(books: Path) -> None:
    text, dataset = card(books, None, "cc-by-4.0"), Dataset.open(str(books))
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "cc-by-4.0"
    assert front["configs"][0]["data_files"][0]["path"] == "shard-*.docs.parquet"
    for part in (
        dataset.digest,
        dataset.manifest.tokenizer.sha256,
        f"{dataset.tokens:,}",
        "books.jsonl",
        "cc-by-4.0",
        f"olm-data pull {BOOKS}",
    ):
        assert part in text


def test_no_licence_is_made_up(books: Path) -> None:
    text = card(books, None)
    assert "license" not in text.split("---")[1]
    assert "Not stated" in text


def test_words_around_our_part_stay(books: Path) -> None:
    first = card(books, None)
    mine = first.replace("tags:", "tags:\n- mine").rstrip("\n") + "\n\nMy own words.\n"
    again = card(books, mine.replace("Sources", "Something old"))
    assert again == mine


@pytest.mark.parametrize("before", ["# Somebody's card\n", ""])
def test_a_card_that_is_not_ours_is_left(hub: HubStub, books: Path, before: str) -> None:
    assert card(books, before) is None
    folder = hub.root / "datasets/lab/books"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(before)
    done = push(str(books), BOOKS)
    assert (folder / "README.md").read_text() == before
    assert "README.md has no part of ours and is left as it is" in done.notes
