"""The page of Hugging Face's families says what the table says."""

from __future__ import annotations

from support.hf_page import PAGE, rendered

from olm_train.extensions.hf.table import FAMILIES


def test_the_page_is_that_of_the_table() -> None:
    page = PAGE.read_text()
    assert rendered(page) == page, "python tests/support/hf_page.py"
    assert all(f"### {family.name}\n" in page for family in FAMILIES)
