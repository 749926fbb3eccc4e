"""The pages of names are what docs/api.py makes of the docstrings, and llms.txt leads somewhere."""

from __future__ import annotations

import re
import runpy

import pytest
from support.pages import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize("package", ["olm_data", "olm_train"])
def test_a_page_of_names_is_what_the_docstrings_say(package: str) -> None:
    made = runpy.run_path(str(DOCS / "api.py"))["page"](package)
    assert (DOCS / "reference" / "api" / f"{package}.md").read_text() == made, "python docs/api.py"


def test_llms_txt_names_pages_that_are_there() -> None:
    named = re.findall(r"\]\(([^)]+)\)", (REPOSITORY / "llms.txt").read_text())
    assert len(named) > 20
    assert [place for place in named if not (REPOSITORY / place).is_file()] == []
