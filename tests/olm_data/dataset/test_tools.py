"""The informational part of a manifest: typed here, texts in the file, never a reason to fail."""

from __future__ import annotations

import pytest

from olm_data.dataset.tools import Copies, PassedCount, Tools

STORED = {
    "olm": "0.22.0",
    "python": "3.11.7",
    "numpy": "2.4.6",
    "encoder": "gigatoken",
    "tokenizer": "gpt2",
    "passed_over": '{"hidden":{"count":2,"names":[".a",".b"]}}',
    "duplicates": "50",
    "duplicate_bytes": "1234",
    "content": "0f" * 16,
}
TOOLS = Tools(
    versions={"olm": "0.22.0", "python": "3.11.7", "numpy": "2.4.6"},
    encoder="gigatoken",
    tokenizer="gpt2",
    passed_over={"hidden": PassedCount(2, [".a", ".b"])},
    copies=Copies(50, 1234, "0f" * 16),
)


def test_what_is_stored_are_the_texts_of_version_1() -> None:
    assert TOOLS.stored() == STORED
    assert Tools.of(STORED) == TOOLS
    assert Tools().stored() == {}
    assert Tools.of({}) == Tools()


@pytest.mark.parametrize("text", ["", "-1", "x", "1.5", "9" * 20])
def test_numbers_that_are_none_are_left_out(text: str) -> None:
    assert Tools.of({**STORED, "duplicates": text}).copies is None
