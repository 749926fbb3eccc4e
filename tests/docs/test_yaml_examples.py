"""Configurations on a page are what the schemas take: whole files, or marked as part of one.

`<!-- part of train.yaml -->` in the line above a block: fields that it leaves out are not missed.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from support.pages import REPOSITORY

from olm_data.mixture.manifest import SCHEMA as MIXTURE
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.mixtures import SearchConfig
from olm_train.extensions.launch.config import LaunchConfig
from olm_train.run.command import SCHEMA as TRAINING

SCHEMAS = {
    "mix.yaml": MIXTURE,
    "train.yaml": TRAINING,
    "recipe.yaml": REPOSITORY / "olm_data" / "tokenization" / "recipe.schema.json",
}
schema_of = runpy.run_path(str(REPOSITORY / "docs" / "schemas.py"))["schema_of"]
OTHERS = [
    schema_of(LadderConfig, "ladder.yaml"),
    schema_of(SearchConfig, "mix-search.yaml"),
    schema_of(LaunchConfig, "launch.yaml"),
]
BLOCK = re.compile(r"(?:<!-- part of (\S+) -->\n)? *```yaml\n(.*?)^ *```$", re.M | re.S)
WRITTEN = re.compile(
    r"(?:<!-- part of (\S+) -->\n```bash\n)?^ *cat > \S+\.yaml <<'?(\w+)'?\n(.*?)^ *\2$",
    re.M | re.S,
)
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def examples() -> list[Any]:
    """(what it is a part of or None, text) of each YAML that a page shows or writes to a file."""
    found = []
    for page in PAGES:
        text = page.read_text()
        shown = [(m.start(), m[1], m[2]) for m in BLOCK.finditer(text)]
        shown += [(m.start(), m[1], m[3]) for m in WRITTEN.finditer(text)]
        for start, part, content in shown:
            line = text.count("\n", 0, start) + 1
            found.append(pytest.param(part, content, id=f"{page.relative_to(REPOSITORY)}:{line}"))
    return found


def without_required(node: Any) -> Any:
    """The schema of a part: nothing is missing."""
    if isinstance(node, dict):
        return {k: without_required(v) for k, v in node.items() if k != "required"}
    return [without_required(item) for item in node] if isinstance(node, list) else node


def schema(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize(("part", "text"), examples())
def test_what_a_page_shows_is_taken(part: str | None, text: str) -> None:
    content = yaml.safe_load(text)
    if part is not None:
        kinds = [without_required(schema(SCHEMAS[part]))]
    else:
        kinds = [*map(schema, SCHEMAS.values()), *OTHERS]
    mistakes = [
        [error.message for error in Draft202012Validator(kind).iter_errors(content)]
        for kind in kinds
    ]
    assert [] in mistakes, mistakes


def test_there_are_examples_of_each_kind_and_a_mistake_is_found() -> None:
    assert len(examples()) > 15
    recipe = schema(SCHEMAS["recipe.yaml"])
    assert list(Draft202012Validator(recipe).iter_errors({"inptus": ["a"]}))
