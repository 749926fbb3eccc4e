"""Named model sizes, as data. A preset fixes the shape; the vocabulary comes from the data.

The name is nominal: within a tenth, it lies between the parameters without embeddings and the
parameters with a tied table of 50,304 entries.
"""

from __future__ import annotations

from typing import Any

from olm_data.errors import UsageError, suggest
from olm_train.model.decoder import DecoderConfig

PRESETS: dict[str, dict[str, Any]] = {
    "olm-1m": {"d_model": 128, "n_layers": 5, "n_heads": 4},
    "olm-4m": {"d_model": 256, "n_layers": 5, "n_heads": 4},
    "olm-10m": {"d_model": 320, "n_layers": 8, "n_heads": 5},
    "olm-30m": {"d_model": 512, "n_layers": 9, "n_heads": 8},
    "olm-60m": {"d_model": 640, "n_layers": 12, "n_heads": 10},
    "olm-125m": {"d_model": 768, "n_layers": 12, "n_heads": 12},
    "olm-350m": {"d_model": 1024, "n_layers": 24, "n_heads": 8},
    "olm-760m": {"d_model": 1536, "n_layers": 24, "n_heads": 12},
    "olm-1b": {"d_model": 2048, "n_layers": 16, "n_heads": 16, "n_kv_heads": 8,
               "hidden_size": 8192, "rope_theta": 500_000.0},
}  # fmt: skip


def preset_fields(name: str) -> dict[str, Any]:
    """The `DecoderConfig` fields that preset `name` sets.

    Raises:
        UsageError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise UsageError(
            f"unknown model preset {name!r}", where="model.preset", fix=suggest(name, PRESETS)
        )
    return dict(PRESETS[name])


def preset(name: str, *, vocab_size: int, **overrides: Any) -> DecoderConfig:
    """The config of preset `name` for a vocabulary, with any field replaced."""
    return DecoderConfig(**{**preset_fields(name), "vocab_size": vocab_size, **overrides})
