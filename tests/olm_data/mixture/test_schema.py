"""The JSON Schemas that editors use take the examples of this repository, and find mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from support.stand_in import MANIFEST

from olm_data.mixture.manifest import SCHEMA as PATH

TRAIN = Path(__file__).parents[3] / "olm_train/run/train.schema.json"
PIPELINES = Path(__file__).parents[3] / "pipelines"


def mistakes(schema: Path, content: Any) -> list[str]:
    found = Draft202012Validator(json.loads(schema.read_text())).iter_errors(content)
    return [error.message for error in found]


@pytest.mark.parametrize("path", sorted(PIPELINES.glob("*/[mt]*.yaml")), ids=str)
def test_a_pipeline_names_its_schema_which_takes_it(path: Path) -> None:
    schema = PATH if path.name.startswith("mix") else TRAIN
    first = path.read_text().splitlines()[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == schema
    assert mistakes(schema, yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 20260101", "sed: 1"),
        ("version: 1", "version: 2"),
        ("sequence_length: 2048", "sequence_length: 0"),
        ("packing: concat", "packing: bestfit"),
        ("max_epochs: 4", "max_epoch: 4"),
        ("  web:  {", "  'we b': {"),
        ("name: main, ", ""),
    ],
)
def test_a_mistake_in_a_manifest_is_found(old: str, new: str) -> None:
    assert mistakes(PATH, yaml.safe_load(MANIFEST)) == []
    assert old in MANIFEST
    assert mistakes(PATH, yaml.safe_load(MANIFEST.replace(old, new)))


@pytest.mark.parametrize("wrong", [{"sede": 1}, {"threads": 0}, {"comm": {"init_timeout": 3}}])
def test_a_mistake_in_a_training_configuration_is_found(wrong: dict[str, Any]) -> None:
    content = yaml.safe_load((PIPELINES / "quickstart/train.yaml").read_text())
    assert mistakes(TRAIN, content | wrong)
