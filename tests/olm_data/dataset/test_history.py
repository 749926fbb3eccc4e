"""Versions of a dataset: each begins with the one before, and a broken chain is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.adding import add_to
from support.tokenizing import make_dataset, write_jsonl

from olm_data.dataset.manifest import version_name
from olm_data.dataset.plan import Version, check_chain, plan_digests, plan_name, read_plans
from olm_data.errors import ValidationError
from olm_data.storage.store import Store

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
    kept = path.read_bytes()
    path.write_bytes(kept.replace(b"0.jsonl", b"9.jsonl"))
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
