"""What older formats of a checkpoint wrote otherwise, brought to what this program reads.

    version 1: model.qk_norm: true | false -> "head" | null

Never: guess. A value that no version wrote stays as it is, and is refused where it is parsed.
"""

from __future__ import annotations

from typing import Any


def migrated_config(config: dict[str, Any], version: int) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint of format `version` in today's words."""
    model = config.get("model")
    if version == 1 and isinstance(model, dict) and isinstance(model.get("qk_norm"), bool):
        config = {**config, "model": {**model, "qk_norm": "head" if model["qk_norm"] else None}}
    return config
