"""Attention in a config.json: biases, the scale of products, and windows: one size, and for each
layer whether it has it.

`layer_types` is the only full account. Older files give a rule in its place, and readers that do
not know the list follow the rule: it is written beside the list where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from olm_train.extensions.hf.fields import ConfigReader, Json, Ours, Problems, Row
from olm_train.model.config import DecoderConfig

SLIDING, FULL = "sliding_attention", "full_attention"
_SWITCH, _PATTERN = "use_sliding_window", "sliding_window_pattern"
_FIRST = "max_window_layers"

Rule = Callable[[ConfigReader, int], list[bool]]
"""(config.json, layers) -> which layers have a window, where `layer_types` is absent."""


def one_full_in(interval: int) -> Rule:
    """Every so many layers one has no window: Gemma's and OLMo 3's."""
    return lambda given, layers: [(layer + 1) % interval != 0 for layer in range(layers)]


def _by_pattern(given: ConfigReader, layers: int) -> list[bool]:
    every = given.take(_PATTERN, int, 6)
    return one_full_in(max(every, 1))(given, layers)


def _from_layer(given: ConfigReader, layers: int) -> list[bool]:
    first = given.take(_FIRST, int, 28)
    return [layer >= first for layer in range(layers)]


def _without_rope(given: ConfigReader, layers: int) -> list[bool]:
    rotated = given.take("no_rope_layers", list[int]) or [
        (layer + 1) % max(given.take("no_rope_layer_interval", int, 4), 1)
        for layer in range(layers)
    ]
    return [not each for each in rotated[:layers]]


@dataclass(frozen=True)
class Bias(Row):
    """`attention_bias`: of queries, keys, values and output."""

    name = "attention_bias"
    field = "attention.bias"
    says = "`attention.bias`: null or `all`"

    def read(self, given: ConfigReader) -> Ours:
        return {self.field: "all" if given.take(self.name, bool, False) else None}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        bias = config.attention.bias
        if bias == "qkv":
            problems.refuse(self.field, "is qkv", "null or all")
        return {self.name: bias is not None}


@dataclass(frozen=True)
class QueryScale(Row):
    """`query_pre_attn_scalar`, a whole number."""

    default: int
    name = "query_pre_attn_scalar"
    field = "attention.query_pre_attn_scalar"
    says = "`attention.query_pre_attn_scalar`, a whole number"

    def read(self, given: ConfigReader) -> Ours:
        return {self.field: given.take(self.name, float, self.default)}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        value = config.attention.query_pre_attn_scalar or config.head_size
        if value != int(value):
            problems.refuse(self.field, f"is {value}", max(round(value), 1))
        return {"query_pre_attn_scalar": int(value)}


@dataclass(frozen=True)
class LayerWindows(Row):
    """`layer_types` and `sliding_window`.

    Attributes:
        rule: of files without the list.
        default: `sliding_window` where it is absent.
        more: fields that there are beside them: `use_sliding_window`, without which no layer has a
            window; `sliding_window_pattern`, which other readers follow; `max_window_layers`:
            later layers have a window.
    """

    rule: Rule
    default: int | None
    more: tuple[str, ...] = ()
    field = "attention.sliding_window"
    says = "`attention.sliding_window`: one size, any layers"

    @property
    def theirs(self) -> tuple[str, ...]:
        return ("layer_types", "sliding_window", *self.more)

    def read(self, given: ConfigReader) -> Ours:
        layers = given.layers()
        types = given.take("layer_types", list[str])
        size = given.take("sliding_window", int, self.default, null=None)
        used = given.take(_SWITCH, bool, False) if _SWITCH in self.more else True
        ruled = self.rule(given, layers)
        if _FIRST in self.more:
            given.take(_FIRST, int, 28)
        if types is None:
            sliding = ruled if used and size is not None else [False] * layers
        elif len(types) != layers or not set(types) <= {SLIDING, FULL}:
            given.refuse("layer_types", f"is not a {SLIDING} or {FULL} for each layer")
            return {}
        else:
            sliding = [each == SLIDING for each in types]
            if _PATTERN in self.more and _PATTERN in given and sliding != ruled:
                given.refuse(_PATTERN, "says another thing than layer_types")
        if any(sliding) and not used:
            given.refuse(_SWITCH, f"is false, and layer_types has {SLIDING}")
        elif any(sliding) and (size is None or size < 1):
            given.refuse("sliding_window", "is not a number of tokens of at least 1")
        else:
            return {self.field: windows_of(sliding, size)}
        return {}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        sliding = [window is not None for window in config.windows]
        size = one_size(config, problems)
        written: dict[str, object] = {
            "layer_types": [SLIDING if each else FULL for each in sliding],
            # where there is no switch, their code asks for a size even if no layer has a window
            "sliding_window": size if size is not None or _SWITCH in self.more else self.default,
        }
        if _SWITCH in self.more:
            written[_SWITCH] = any(sliding)
        if _FIRST in self.more:
            first = sliding.index(True) if any(sliding) else len(sliding)
            written[_FIRST] = first if all(sliding[first:]) else len(sliding)
        if _PATTERN in self.more and (every := interval_of([not each for each in sliding])):
            written[_PATTERN] = every
        return written


@dataclass(frozen=True)
class OneWindow(Row):
    """`sliding_window` for all layers (Mistral).

    Attributes:
        default: where it is absent.
        switched: there is a `use_sliding_window`, without which there is no window (Qwen 3 MoE).
    """

    default: int | None
    switched: bool = False
    field = "attention.sliding_window"
    says = "`attention.sliding_window`: the same in all layers"

    @property
    def theirs(self) -> tuple[str, ...]:
        return ("sliding_window", "layer_types", *([_SWITCH] if self.switched else []))

    def read(self, given: ConfigReader) -> Ours:
        size = given.take("sliding_window", int, self.default, null=None)
        if self.switched and not given.take(_SWITCH, bool, False):
            size = None
        types = given.take("layer_types", list[str])
        if types is not None and set(types) != {FULL if size is None else SLIDING}:
            given.refuse("layer_types", "differs from sliding_window, which counts for all layers")
        if size is not None and size < 1:
            given.refuse("sliding_window", "is less than 1")
            return {}
        return {self.field: None if size is None else (size,)}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        size = one_size(config, problems)
        if size is not None and None in config.windows:
            problems.refuse(self.field, "is not of all layers", f"[{size}]")
        return {"sliding_window": size} | ({_SWITCH: size is not None} if self.switched else {})


WINDOWS_FROM_LAYER = LayerWindows(_from_layer, 4096, (_SWITCH, _FIRST))
WINDOWS_WITHOUT_ROPE = LayerWindows(_without_rope, None, (_SWITCH,))
WINDOWS_BY_PATTERN = LayerWindows(_by_pattern, 4096, (_PATTERN,))


def windows_of(sliding: list[bool], size: int | None) -> tuple[int, ...] | None:
    """Return `attention.sliding_window` for layers that have a window of a size, or none."""
    if not any(sliding) or size is None:
        return None
    return tuple(size if each else -1 for each in sliding)


def one_size(config: DecoderConfig, problems: Problems) -> int | None:
    """Return the size of all windows, None: there are none; several are refused."""
    sizes = sorted({window for window in config.windows if window is not None})
    if len(sizes) > 1:
        problems.refuse(
            "attention.sliding_window", f"has several sizes, {sizes}", f"{sizes[-1]} in all"
        )
    return sizes[-1] if sizes else None


def interval_of(marked: list[bool]) -> int | None:
    """Return n where every n-th layer is marked and no other; more than there are: none is."""
    first = marked.index(True) + 1 if any(marked) else len(marked) + 1
    fits = all(each == ((layer + 1) % first == 0) for layer, each in enumerate(marked))
    return first if fits else None
