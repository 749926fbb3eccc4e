"""The card of a dataset: what is ours of it is renewed, what is not is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.hub_stub import HubStub

from olm_data.dataset.dataset import Dataset
from olm_data.extensions.hub.datasets import dataset_card
from olm_data.extensions.hub.push import push
from olm_data.extensions.stats.count import collect

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
    assert text is not None
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
    assert text is not None
    assert "license" not in text.split("---")[1]
    assert "Not stated" in text


def test_words_around_our_part_stay(books: Path) -> None:
    first = card(books, None)
    assert first is not None
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
