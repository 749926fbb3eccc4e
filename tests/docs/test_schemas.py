"""The JSON Schemas of the packages are what docs/schemas.py makes of the types."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from support.pages import REPOSITORY

from olm_data.tokenization.recipe import Recipe

MADE = runpy.run_path(str(REPOSITORY / "docs" / "schemas.py"))


@pytest.mark.parametrize("path", MADE["SCHEMAS"], ids=lambda path: path.name)
def test_a_schema_is_that_of_the_types(path: Path) -> None:
    text = MADE["encoded"](MADE["SCHEMAS"][path]())
    assert path.read_text() == text, "python docs/schemas.py"
    assert str(Path.home()) not in text


def test_a_field_has_the_words_of_its_docstring() -> None:
    assert MADE["train"]()["$defs"]["AdamWConfig"]["properties"]["lr"]["description"]
    fields = MADE["recipe"]()["$defs"]["Recipe"]["properties"]
    assert list(fields) == list(Recipe.__struct_fields__)
    assert all(field["description"] for field in fields.values())


def test_the_schemas_are_valid_json() -> None:
    assert all(json.loads(path.read_bytes())["$defs"] for path in MADE["SCHEMAS"])
