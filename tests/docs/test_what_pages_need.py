"""A page says visibly what its reader has before the first block; no two pages share a run."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from support.pages import FENCE, Page, pages

NEEDING = [page for page in pages() if page.given]


def before_the_first_block(page: Page) -> str:
    """What a reader sees of a page above its first block: comments are invisible."""
    above = FENCE.split(page.path.read_text(), maxsplit=1)[0]
    return re.sub(r"<!--.*?-->", "", above, flags=re.DOTALL)


@pytest.mark.parametrize("page", NEEDING, ids=lambda page: page.name)
def test_u8_what_is_given_is_said_above_the_first_block(
    page: Page, said_of_given: dict[str, str]
) -> None:
    found = re.search(r"^\*\*You need\*\* .*?\n\n", before_the_first_block(page), re.M | re.S)
    assert found is not None, "no paragraph begins with **You need**"
    assert [word for word in page.given if said_of_given[word] not in found[0]] == []


def test_u8_everything_that_can_be_given_has_words_for_the_reader(
    given_names: set[str], said_of_given: dict[str, str]
) -> None:
    assert given_names == set(said_of_given)


def test_u8_no_two_pages_train_into_one_folder() -> None:
    folders = Counter(
        folder
        for page in pages()
        if "mixture" in page.given or page.name.startswith("docs/tutorial/")
        for folder in {
            found
            for block in page.blocks
            if block.runs
            for found in re.findall(r"save_folder(?:: |=)\"?([\w/-]+)", block.text)
        }
    )
    assert len(folders) > 8
    assert [folder for folder, count in folders.items() if count > 1] == []
