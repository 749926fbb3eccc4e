"""The JSON Schema of recipe.yaml and the table of its reference page, both made of `Recipe`.

Recipe --schema--> recipe.schema.json: editors        --refresh--> docs/reference/recipe.md

python -m olm_data.tokenization.recipe_reference [PAGE]       write both anew
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from olm_data.config.reference import refresh
from olm_data.config.schema import schema_of
from olm_data.tokenization.recipe import Recipe

PAGE = "docs/reference/recipe.md"
PATH = Path(__file__).with_name("recipe.schema.json")


def encoded() -> str:
    """Return the text of `recipe.schema.json`."""
    return json.dumps(schema_of(Recipe, "recipe.yaml of olm-data tokenize"), indent=1) + "\n"


def main(arguments: list[str]) -> None:
    """Write the table of the page and the JSON Schema anew."""
    page = Path(arguments[0] if arguments else PAGE)
    page.write_text(refresh(page.read_text(), Recipe))
    PATH.write_text(encoded())


if __name__ == "__main__":
    main(sys.argv[1:])
