"""The JSON Schema of a mixture manifest, made of its types: editors complete and check with it.

ManifestKeys, keys of packings and orders --schema--> mixture.schema.json

`python docs/fields.py` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path

from olm_data.config.hints import Schema
from olm_data.config.schema import properties, schema_of
from olm_data.mixture.manifest import ManifestKeys
from olm_data.order.orders import manifest_orders
from olm_data.packing.packings import PACKINGS

PATH = Path(__file__).with_name("mixture.schema.json")


def schema() -> Schema:
    """Return the JSON Schema (2020-12) of a manifest."""
    found = schema_of(ManifestKeys, "manifest of a mixture of olm_data", counts=False)
    definitions = found["$defs"]
    for choice in [*PACKINGS.values(), *manifest_orders().values()]:
        keys, _ = properties(choice, definitions, counts=False)  # required with their choice only
        definitions["ManifestKeys"]["properties"] |= keys
    return found


def encoded() -> str:
    """Return the text of `mixture.schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"
