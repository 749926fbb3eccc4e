"""Rows that only some families have: biases, layers without positions, Gemma's scales, GPT-2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from olm_train.extensions.hf.fields import ConfigReader, Json, Ours, Problems, Row
from olm_train.extensions.hf.windows import interval_of
from olm_train.model.config import DecoderConfig


@dataclass(frozen=True)
class Bias(Row):
    """`attention_bias`: of queries, keys, values and output; `mlp_bias`: of the feed-forward.

    Attributes:
        mlp: there is `mlp_bias`.
    """

    mlp: bool
    field = "bias"

    @property
    def theirs(self) -> tuple[str, ...]:
        return ("attention_bias", "mlp_bias") if self.mlp else ("attention_bias",)

    def read(self, given: ConfigReader) -> Ours:
        attention = given.take("attention_bias", bool, False)
        mlp = given.take("mlp_bias", bool, False) if self.mlp else False
        if mlp and not attention:
            given.refuse("mlp_bias", "is true without attention_bias", False)
        return {"bias": "all" if mlp else "attention" if attention else None}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        kinds = (None, "attention", *(("all",) if self.mlp else ()))
        if config.bias not in kinds:
            problems.refuse(
                "bias", f"is {config.bias}", "null or " + " or ".join(map(str, kinds[1:]))
            )
        written: dict[str, object] = {"attention_bias": config.bias is not None}
        return written | ({"mlp_bias": config.bias == "all"} if self.mlp else {})

    @property
    def says(self) -> str:
        return "`bias`: null, `attention`" + (" or `all`" if self.mlp else "")


@dataclass(frozen=True)
class NoRope(Row):
    """`no_rope_layers`: 0 for a layer without positions; such a layer comes every so many."""

    interval: int
    theirs = ("no_rope_layers", "no_rope_layer_interval")
    field = "no_rope_layer_interval"

    def read(self, given: ConfigReader) -> Ours:
        layers = given.layers()
        every = given.take("no_rope_layer_interval", int, self.interval)
        listed = given.take("no_rope_layers", list[int])
        if listed is not None:
            if len(listed) < layers or not set(listed) <= {0, 1}:
                given.refuse("no_rope_layers", "is not a 0 or 1 for each layer")
                return {}
            found = interval_of([each == 0 for each in listed[:layers]])
            if found is None:
                given.refuse("no_rope_layers", "has its zeros at no fixed interval")
                return {}
            every = found
        elif every < 1:
            given.refuse("no_rope_layer_interval", "is less than 1")
            return {}
        return {"no_rope_layer_interval": every}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        every = config.no_rope_layer_interval or config.n_layers + 1
        return {
            "no_rope_layers": [int((n + 1) % every != 0) for n in range(config.n_layers)],
            "no_rope_layer_interval": every,
        }


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
class QueryScale(Row):
    """`query_pre_attn_scalar`, a whole number."""

    default: int
    name = field = "query_pre_attn_scalar"
    says = "`query_pre_attn_scalar`, a whole number"

    def read(self, given: ConfigReader) -> Ours:
        return {"query_pre_attn_scalar": given.take("query_pre_attn_scalar", float, self.default)}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        value = config.query_pre_attn_scalar or config.head_size
        if value != int(value):
            problems.refuse("query_pre_attn_scalar", f"is {value}", max(round(value), 1))
        return {"query_pre_attn_scalar": int(value)}


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


@dataclass(frozen=True)
class TableSize(Row):
    """`n_positions`: entries of the table of positions."""

    default: int
    name = "n_positions"
    ours = ("max_positions", "positions")
    says = "`max_positions`; `positions` is `learned`"

    def read(self, given: ConfigReader) -> Ours:
        size = given.take("n_positions", int, self.default)
        return {"positions": "learned", "max_positions": size}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        if config.positions != "learned":
            problems.refuse("positions", f"is {config.positions}", "learned")
        size = config.max_positions
        return {"n_positions": size, "n_ctx": size}  # the old name, which mlx-lm needs


def is_root(scale: float, width: int) -> bool:
    """Whether a scale is the square root of a width, as far as fp32 can tell."""
    return math.isclose(scale, width**0.5, rel_tol=1e-7)
