"""The JSON Schema of train.yaml, made of `RunConfig`: `python docs/fields.py` writes it.

RunConfig --schema--> train.schema.json: editors, and `check_names` before torch is imported
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from olm_data.config.hints import Schema
from olm_data.config.schema import schema_of

PATH = Path(__file__).with_name("train.schema.json")
SHAPES = {
    "preset": {"type": "string", "description": "a published shape, such as olmo2-1b"},
    "depth": {"type": "integer", "description": "blocks; the rest of the shape follows from it"},
}
"""Fields of `model` that stand for others (see `model.presets`)."""


def schema() -> Schema:
    """Return the JSON Schema (2020-12) of a training configuration."""
    from olm_train.run.config import RunConfig

    found = schema_of(RunConfig, "train.yaml of olm_train")
    # the weights at trainer.load_path may give it
    found["$defs"]["RunConfig"]["required"].remove("model")
    model = found["$defs"]["DecoderConfig"]
    model["properties"] |= SHAPES
    del model["required"]  # a shape or the lock may give them
    return found


def encoded() -> str:
    """Return the text of `train.schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"


@cache
def written() -> Schema:
    """Return the schema that is part of this package."""
    return json.loads(PATH.read_bytes())
