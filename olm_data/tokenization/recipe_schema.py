"""The JSON Schema of recipe.yaml, made of `Recipe`: `python docs/fields.py` writes it."""

from __future__ import annotations

import json
from pathlib import Path

from olm_data.config.schema import schema_of
from olm_data.tokenization.recipe import Recipe

PATH = Path(__file__).with_name("recipe.schema.json")


def encoded() -> str:
    """Return the text of `recipe.schema.json`."""
    return json.dumps(schema_of(Recipe, "recipe.yaml of olm-data tokenize"), indent=1) + "\n"
