"""Shapes as plain fields: named ones, one dial for small studies, and what is laid over them.

    model: {preset: olmo2-1b, ...} | {depth: 12, ...} --written_shape--> fields of DecoderConfig

A preset fixes the shape that a family was pre-trained with; the vocabulary comes from the data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from olm_data.bounded_json import JsonObject as Fields
from olm_data.config.values import KeyPath
from olm_data.errors import UsageError, suggest
from olm_train.model.config import DecoderConfig

PARTS = {
    each.name: getattr(each.default_factory(), "name", None)
    for each in fields(DecoderConfig)
    if each.default_factory is not MISSING
}
"""Parts of a shape, and the kind that each is of where nothing is said."""


def by_name(model: Fields) -> Fields:
    """Return the fields of a shape by name: `norm` is the name of its kind, `norm.eps` a field."""
    found: Fields = {}
    for name, value in model.items():
        inner = value if name in PARTS and isinstance(value, dict) else {"name": value}
        found |= {f"{name}.{key}".removesuffix(".name"): each for key, each in inner.items()}
    return found


def overlaid(shape: Fields, over: Fields) -> Fields:
    """Return fields of a shape with others over them.

    A mapping for a part replaces single fields of it; the whole part where it names another kind.
    Text is the name of a kind.
    """
    found = {**shape}
    for name, given in over.items():
        below = found.get(name)
        if name in PARTS and isinstance(given, dict | str) and below is not None:
            one, other = (
                {"name": each} if isinstance(each, str) else each for each in (below, given)
            )
            kind = one.get("name", PARTS[name])
            given = {**one, **other} if other.get("name", kind) == kind else other
        found[name] = given
    return found


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A shape and what is known of it.

    Attributes:
        fields: what it sets of `DecoderConfig`.
        vocab_size: entries of the published model's table; of ours: those the name goes by.
        parameters: as published, with that vocabulary; None for ours.
        sequence_length: tokens of a row it was pre-trained on.
        source: the published configuration.
    """

    fields: Fields
    vocab_size: int
    parameters: int | None = None
    sequence_length: int = 4096
    source: str = "this project"


def _shape(
    layers: int, width: int, heads: int, *, hidden_size: int | None = None, **fields: Any
) -> Fields:
    wide: Fields = {} if hidden_size is None else {"feed_forward": {"hidden_size": hidden_size}}
    return {"d_model": width, "n_layers": layers, "n_heads": heads, **wide, **fields}


def _family(
    source: str, common: Fields, sizes: dict[str, tuple[str, Fields, int]], **known: Any
) -> dict[str, Preset]:
    """Return the presets of `sizes`: by name, the name in `source`, own fields, parameters."""
    return {
        name: Preset(
            fields={**common, **own},
            parameters=parameters,
            source=f"huggingface.co/{source.format(published)}/config.json",
            **known,
        )
        for name, (published, own, parameters) in sizes.items()
    }


_OURS = {
    # Nominal: within a tenth, the name lies between the parameters without embeddings and the
    # parameters with a tied table of 50,304 entries.
    "olm-1m": _shape(5, 128, 1),  # heads of 128: bits per byte for the time, see benchmarks/LOG.md
    "olm-4m": _shape(5, 256, 2, n_kv_heads=1),
    "olm-10m": _shape(8, 320, 5),
    "olm-30m": _shape(9, 512, 8),
    "olm-60m": _shape(12, 640, 10),
    "olm-125m": _shape(12, 768, 12),
    "olm-350m": _shape(24, 1024, 8),
    "olm-760m": _shape(24, 1536, 12),
    "olm-1b": _shape(16, 2048, 16, n_kv_heads=8, hidden_size=8192, positions={"theta": 500_000.0}),
    "olm-moe-4m": _shape(4, 128, 1, feed_forward={
        "name": "moe", "n_experts": 16, "top_k": 2, "hidden_size": 128, "normalize_scores": True,
    }),
}  # fmt: skip

PRESETS = {
    name: Preset(fields=fields, vocab_size=50_304, sequence_length=2048)
    for name, fields in _OURS.items()
}
"""By name, ours first."""

PRESETS |= _family(
    "openai-community/{}",
    {
        "positions": {"name": "learned", "max_positions": 1024},
        "norm": {"name": "layer_norm", "bias": True, "eps": 1e-5},
        "attention": {"bias": "all"}, "feed_forward": {"name": "gelu", "bias": True},
        "head": {"tied": True},
    },
    {
        "gpt2-small": ("gpt2", _shape(12, 768, 12), 124_439_808),
        "gpt2-medium": ("gpt2-medium", _shape(24, 1024, 16), 354_823_168),
        "gpt2-large": ("gpt2-large", _shape(36, 1280, 20), 774_030_080),
        "gpt2-xl": ("gpt2-xl", _shape(48, 1600, 25), 1_557_611_200),
    },
    vocab_size=50_257, sequence_length=1024,
)  # fmt: skip

PRESETS |= _family(
    "meta-llama/Llama-2-{}-hf",
    {"norm": {"eps": 1e-5}},
    {
        "llama2-7b": ("7b", _shape(32, 4096, 32, hidden_size=11_008), 6_738_415_616),
        "llama2-13b": ("13b", _shape(40, 5120, 40, hidden_size=13_824), 13_015_864_320),
        "llama2-70b": (
            "70b",
            _shape(80, 8192, 64, n_kv_heads=8, hidden_size=28_672),
            68_976_648_192,
        ),
    },
    vocab_size=32_000,
)

PRESETS |= _family(
    "meta-llama/Meta-Llama-3-{}",
    {"norm": {"eps": 1e-5}, "positions": {"theta": 500_000.0}, "n_kv_heads": 8},
    {
        "llama3-8b": ("8B", _shape(32, 4096, 32, hidden_size=14_336), 8_030_261_248),
        "llama3-70b": ("70B", _shape(80, 8192, 64, hidden_size=28_672), 70_553_706_496),
    },
    vocab_size=128_256, sequence_length=8192,
)  # fmt: skip

PRESETS |= _family(
    "meta-llama/Llama-3.2-{}",
    {
        "norm": {"eps": 1e-5}, "n_kv_heads": 8, "feed_forward": {"hidden_size": 8192},
        "head": {"tied": True},
        "positions": {
            "theta": 500_000.0,
            "scaling": {"name": "llama3", "factor": 32.0, "old_context_len": 8192},
        },
    },
    {
        "llama3.2-1b": ("1B", _shape(16, 2048, 32), 1_235_814_400),
        "llama3.2-3b": ("3B", _shape(28, 3072, 24), 3_212_749_824),
    },
    vocab_size=128_256, sequence_length=8192,
)  # fmt: skip

_OLMO: Fields = {
    "block": "reordered_norm", "attention": {"qk_norm": "full"}, "positions": {"theta": 500_000.0},
}  # fmt: skip
_OLMO_7B = _shape(32, 4096, 32, hidden_size=11_008)
_OLMO_32B = _shape(64, 5120, 40, n_kv_heads=8, hidden_size=27_648)

PRESETS |= _family(
    "allenai/OLMo-2-{}",
    _OLMO,
    {
        "olmo2-1b": ("0425-1B", _shape(16, 2048, 16, hidden_size=8192), 1_484_916_736),
        "olmo2-7b": ("1124-7B", _OLMO_7B, 7_298_617_344),
        "olmo2-13b": ("1124-13B", _shape(40, 5120, 40, hidden_size=13_824), 13_716_198_400),
        "olmo2-32b": ("0325-32B", _OLMO_32B, 32_234_279_936),
    },
    vocab_size=100_352,
)

# As pre-trained on rows of 8,192 tokens; the published long-context stage adds scaling:
# {name: yarn, factor: 8, old_context_len: 8192} on the layers without a window.
PRESETS |= _family(
    "allenai/Olmo-3-1025-{}",
    {**_OLMO, "attention": {"qk_norm": "full", "sliding_window": [4096, 4096, 4096, -1]}},
    {"olmo3-7b": ("7B", _OLMO_7B, 7_298_011_136), "olmo3-32b": ("32B", _OLMO_32B, 32_233_522_176)},
    vocab_size=100_278, sequence_length=8192,
)  # fmt: skip

_TIED = {"head": {"tied": True}}
PRESETS |= _family(
    "Qwen/Qwen3-{}-Base",
    {
        "attention": {"qk_norm": "head"}, "positions": {"theta": 1_000_000.0}, "n_kv_heads": 8,
        "head_dim": 128,
    },
    {
        "qwen3-0.6b": ("0.6B", _shape(28, 1024, 16, hidden_size=3072, **_TIED), 596_049_920),
        "qwen3-1.7b": ("1.7B", _shape(28, 2048, 16, hidden_size=6144, **_TIED), 1_720_574_976),
        "qwen3-4b": ("4B", _shape(36, 2560, 32, hidden_size=9728, **_TIED), 4_022_468_096),
        "qwen3-8b": ("8B", _shape(36, 4096, 32, hidden_size=12_288), 8_190_735_360),
        "qwen3-14b": ("14B", _shape(40, 5120, 40, hidden_size=17_408), 14_768_307_200),
        "qwen3-32b": ("32B", _shape(64, 5120, 64, hidden_size=25_600), 32_762_123_264),
    },
    vocab_size=151_936,
)  # fmt: skip

PRESETS |= _family(
    "allenai/OLMoE-1B-7B-{}",
    {"norm": {"eps": 1e-5}, "attention": {"qk_norm": "full"}},
    {
        "olmoe-1b-7b": (
            "0924",
            _shape(16, 2048, 16, feed_forward={
                "name": "moe", "n_experts": 64, "top_k": 8, "hidden_size": 1024,
                "balance": {"name": "aux", "weight": 0.01}, "z_loss": 0.001,
            }),
            6_919_161_856,
        ),
    },
    vocab_size=50_304,
)  # fmt: skip

# Their weight of the balance, 0.001, is of shares of tokens: of slots it is 8 times that.
PRESETS |= _family(
    "Qwen/Qwen3-{}",
    {
        "attention": {"qk_norm": "head"}, "positions": {"theta": 1_000_000.0}, "n_kv_heads": 4,
        "head_dim": 128,
    },
    {
        "qwen3-30b-a3b": (
            "30B-A3B-Base",
            _shape(48, 2048, 32, feed_forward={
                "name": "moe", "n_experts": 128, "top_k": 8, "hidden_size": 768,
                "normalize_scores": True, "balance": {"name": "global_aux", "weight": 0.008},
            }),
            30_532_122_624,
        ),
    },
    vocab_size=151_936,
)  # fmt: skip


def preset_fields(name: str) -> Fields:
    """The `DecoderConfig` fields that preset `name` sets, as plain values.

    Raises:
        UsageError: there is no preset of that name.
    """
    return copy.deepcopy(_named(name).fields)


def depth_fields(depth: int) -> Fields:
    """The shape that one number decides: `depth` blocks, all else in proportion to it.

    Heads have 128 places; the width is 64 times the depth, rounded up to whole heads. So the
    ratio of width to depth, which the optimum hardly depends on, stays the same over all sizes.

    Raises:
        UsageError: depth is less than 1.
    """
    if depth < 1:
        raise UsageError(f"model.depth: {depth} is less than 1", where="model.depth")
    heads = -(-64 * depth // 128)
    return _shape(depth, 128 * heads, heads)


def written_shape(model: Fields, where: Callable[[KeyPath], str]) -> Fields:
    """Return the fields of `model`, over those that its `preset` or `depth` stands for.

    Args:
        model: as the user wrote it.
        where: place of a field, for messages.

    Raises:
        UsageError: both are given, or one has no meaning or no effect.
    """
    given = {**model}
    named = [name for name in ("preset", "depth") if name in given]
    if not named:
        return given
    value = given.pop(named[0])
    try:
        if len(named) == 2:
            raise UsageError(
                "model.preset and model.depth each give the shape", fix="remove one of the two"
            )
        if named == ["preset"]:
            shape = preset_fields(str(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            shape = depth_fields(value)
        else:
            raise UsageError(f"model.depth is an integer, not {value!r}")
        if (there := by_name(shape)).keys() <= by_name(given).keys():
            raise UsageError(
                f"model.{named[0]} has no effect: {', '.join(there)} are all given beside it",
                why="fields of model override those of the shape that it names",
                fix="leave it out, or the fields",
            )
    except UsageError as error:
        error.where = where(("model", named[-1]))
        raise
    return overlaid(shape, given)


def preset(name: str, *, vocab_size: int, **overrides: Any) -> DecoderConfig:
    """The config of preset `name` for a vocabulary, with fields replaced: `overlaid`."""
    return DecoderConfig(**overlaid(_named(name).fields, overrides), vocab_size=vocab_size)


def _named(name: str) -> Preset:
    if name not in PRESETS:
        raise UsageError(
            f"unknown model preset {name!r}", where="model.preset", fix=suggest(name, PRESETS)
        )
    return PRESETS[name]
