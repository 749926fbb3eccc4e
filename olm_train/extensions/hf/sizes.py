"""Sizes in a config.json that more than a name stands for: heads, and the scale of embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from olm_train.extensions.hf.fields import ConfigReader, Json, Ours, Problems, Row
from olm_train.model.config import DecoderConfig


@dataclass(frozen=True)
class EmbedScale(Row):
    """Embeddings are multiplied by the square root of the width: no field of theirs says it."""

    theirs = ()
    field = "embed_scale"
    says = "`embed_scale` is the square root of `d_model`"

    def read(self, given: ConfigReader) -> Ours:
        return {"embed_scale": max(given.take("hidden_size", int, 1), 1) ** 0.5}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        if not is_root(config.embed_scale, config.d_model):
            wanted = config.d_model**0.5
            problems.refuse("embed_scale", f"is {config.embed_scale}", f"{wanted}, sqrt(d_model)")
        return {}


@dataclass(frozen=True)
class DivisibleWidth(Row):
    """They refuse a `hidden_size` that the number of heads does not divide."""

    theirs = ours = ()

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        if config.d_model % config.n_heads:
            problems.refuse("n_heads", f"is {config.n_heads}, which does not divide d_model")
        return {}


@dataclass(frozen=True)
class EqualHeads(Row):
    """As many keys and values as queries, which together are as wide as the model."""

    theirs = ()
    ours = ("n_kv_heads", "head_dim")
    says = "`n_kv_heads` is `n_heads`, `head_dim` is `d_model` / `n_heads`"

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        if config.kv_heads != config.n_heads:
            problems.refuse("n_kv_heads", f"is {config.kv_heads}", config.n_heads)
        if config.head_size * config.n_heads != config.d_model:
            problems.refuse("head_dim", f"is {config.head_size}", "d_model / n_heads")
        return {}


def is_root(scale: float, width: int) -> bool:
    """Whether a scale is the square root of a width, as far as fp32 can tell."""
    return math.isclose(scale, width**0.5, rel_tol=1e-7)
