"""Every link from a page to the repository leads somewhere, and every page can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.pages import FENCE, REPOSITORY

PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "pipelines").rglob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[tuple[Path, str]]:
    """File and anchor of each link of a page that does not lead out of the repository."""
    found = []
    for target in LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """The anchors that its headings get: lower case, spaces to hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page}: {target}"
        assert target.is_relative_to(REPOSITORY), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(target), f"{page}: {target.name}#{anchor}"


def test_the_index_names_every_page_and_the_readme_the_index() -> None:
    index = REPOSITORY / "docs" / "README.md"
    below = {page for page in PAGES if page.is_relative_to(index.parent)}
    assert below - {index} <= {target for target, _ in links(index)}
    assert index in {target for target, _ in links(REPOSITORY / "README.md")}
