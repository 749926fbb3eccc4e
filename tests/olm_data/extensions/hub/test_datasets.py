"""What of a folder is a dataset, and what is told of one that is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from support.hub_stub import HubStub

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import MANIFEST
from olm_data.errors import InputError, UsageError
from olm_data.extensions.hub.datasets import Datasets, dataset_card, dataset_parts
from olm_data.extensions.hub.push import push
from olm_data.extensions.stats.count import collect
from olm_data.extensions.verify.datasets import verify
from olm_data.storage.store import Store


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


# The card of a dataset: what is ours of it is renewed, what is not is left alone.
BOOKS = "hf://datasets/lab/books"


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
