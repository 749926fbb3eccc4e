"""The manifest: its digest covers it, and what was edited or leads elsewhere is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from support.adding import add_to
from support.small_datasets import write_dataset
from support.tokenizing import make_dataset, write_jsonl

from olm_data.bounded_json import canonical_json
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import decode_manifest, version_name
from olm_data.dataset.plan import Version, check_chain, plan_digests, plan_name, read_plans
from olm_data.errors import InputError, ValidationError
from olm_data.storage.store import Store

SHARDS = [[[1, 2, 3], [4], [5, 6]], [[7, 8, 9, 10, 11]]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "d", SHARDS)
    return tmp_path / "d"


def test_manifest_digest_is_the_sha256_of_its_canonical_json(path: Path) -> None:
    body = json.loads((path / "manifest.json").read_text())
    digest = body.pop("digest")
    body.pop("tools")
    assert hashlib.sha256(canonical_json(body)).hexdigest() == digest


def test_a_folder_without_a_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no manifest\.json"):
        Dataset.open(str(tmp_path))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InputError, match="unfinished"):
        Dataset.open(str(tmp_path))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["shards"][0].update(tokens=7), "digest"),
        (lambda m: m.update(dtype="uint32"), "digest"),
        (lambda m: m.update(extra=1), "malformed"),
        (lambda m: m.pop("totals"), "malformed"),
        (lambda m: m.update(version=3), "version 3"),
    ],
)
def test_an_edited_manifest_is_refused(path: Path, edit, message: str) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValidationError, match=message):
        Dataset.open(str(path))


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["totals"].update(trained=1),
        lambda m: m["shards"][0].update(trained=1),
        lambda m: m["shards"][0]["sha256"].update(labels="0" * 64),
    ],
)
def test_half_of_what_labels_need_is_refused(path: Path, edit) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest)
    body = {k: v for k, v in manifest.items() if k not in ("digest", "tools")}
    manifest["digest"] = hashlib.sha256(canonical_json(body)).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValidationError, match="trained tokens does not go together"):
        Dataset.open(str(path))


def test_what_an_earlier_text_names_by_its_digest_is_known_by_it_alone(path: Path) -> None:
    """A run that goes on opens 10^5 shards: whoever wrote its lock has looked at the text."""
    data = (path / "manifest.json").read_bytes()
    twice = data.replace(b'"container"', b'"container": "npy", "container"', 1)
    known = decode_manifest(data, "there")
    assert decode_manifest(twice, "there", str(known.digest)) == known
    for digest in (None, "0" * 64):
        with pytest.raises(ValidationError, match="stands twice"):
            decode_manifest(twice, "there", digest)


def test_a_key_that_stands_twice_in_a_manifest_is_refused_though_its_digest_holds(
    path: Path,
) -> None:
    text = (path / "manifest.json").read_text()
    for key in ('"dtype"', '"documents"', '"docs"'):
        place, value = text.index(key), "7" if key == '"documents"' else '"x"'
        twice = f"{text[:place]}{key}: {value}, {text[place:]}"
        (path / "manifest.json").write_text(twice)
        with pytest.raises(ValidationError, match="malformed"):
            Dataset.open(str(path))
    spelled = text.replace('"dtype"', '"d\\u0074ype"')  # an escape: read the long way, and good
    (path / "manifest.json").write_text(spelled)
    Dataset.open(str(path))


# Versions of a dataset: each begins with the one before, and a broken chain is told.
TEXTS = [[f"text {a} number {n}" for n in range(20)] for a in "abc"]


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    first, *more = (write_jsonl(tmp_path / f"{n}.jsonl", part) for n, part in enumerate(TEXTS))
    make_dataset([first], tiny_tokenizer, tmp_path / "out", shard_tokens=500)
    for each in more:
        add_to(tmp_path / "out", each)
    return tmp_path / "out"


def test_each_version_begins_with_the_one_before(folder: Path) -> None:
    store = Store(str(folder))
    newest = Version.newest(store)
    assert [plan_name(n) for n in range(3)] == ["plan.json", "plan-00001.json", "plan-00002.json"]
    assert [plan.digest for plan in read_plans(store, newest.manifest)] == plan_digests(
        newest.manifest
    )
    assert check_chain(store, newest.manifest) == []
    assert len(newest.records()) == len(newest.manifest.shards)
    for addition in newest.manifest.additions:
        assert (folder / version_name(addition.parent)).exists()


def test_a_version_is_replaced_by_the_next_and_by_itself_not_at_all(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    newest = Version.newest(Store(str(folder)))
    newest.replace(newest.manifest)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_an_earlier_version_that_was_changed_or_lost_is_told(folder: Path) -> None:
    store = Store(str(folder))
    manifest = Version.newest(store).manifest
    path = folder / version_name(manifest.additions[0].parent)
    path.write_bytes(path.read_bytes().replace(b"0.jsonl", b"9.jsonl"))
    assert any(path.name in file for file, _, _ in check_chain(store, manifest))
    path.unlink()
    ((file, _, found),) = check_chain(store, manifest)
    assert (Path(file).name, found) == (path.name, "nothing")


@pytest.mark.parametrize("damage", ["lost", "other"])
def test_a_plan_or_record_that_is_not_the_manifests_is_refused(folder: Path, damage: str) -> None:
    store = Store(str(folder))
    newest = Version.newest(store)
    plan, record = folder / "plan-00001.json", next(folder.glob("shard-*.json"))
    if damage == "lost":
        plan.unlink()
        record.unlink()
    else:
        plan.write_bytes((folder / "plan-00002.json").read_bytes())
        record.write_bytes(record.read_bytes() + b" ")
    with pytest.raises(ValidationError, match="plan"):
        read_plans(store, newest.manifest)
    with pytest.raises(ValidationError, match="commit record"):
        newest.records()
