"""Windows of attention in a config.json: one size, and for each layer whether it has it.

`layer_types` is the only full account. Older files give a rule in its place, and readers that do
not know the list follow the rule: it is written beside the list where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from olm_train.extensions.hf.fields import Given, Json, Ours, Problems, Row
from olm_train.model.config import DecoderConfig

SLIDING, FULL = "sliding_attention", "full_attention"

Rule = Callable[[Given, int], list[bool]]
"""(config.json, layers) -> which layers have a window, where `layer_types` is absent."""


def one_full_in(interval: int) -> Rule:
    """Every so many layers one has no window: Gemma's and OLMo 3's."""
    return lambda given, layers: [(layer + 1) % interval != 0 for layer in range(layers)]


def _by_pattern(given: Given, layers: int) -> list[bool]:
    every = given.take("sliding_window_pattern", int, 6)
    return one_full_in(max(every, 1))(given, layers)


def _from_layer(given: Given, layers: int) -> list[bool]:
    first = given.take("max_window_layers", int, 28)
    return [layer >= first for layer in range(layers)]


def _without_rope(given: Given, layers: int) -> list[bool]:
    rotated = given.take("no_rope_layers", list[int]) or [
        (layer + 1) % max(given.take("no_rope_layer_interval", int, 4), 1)
        for layer in range(layers)
    ]
    return [not each for each in rotated[:layers]]


@dataclass(frozen=True)
class Windows(Row):
    """`layer_types` and `sliding_window`.

    Attributes:
        rule: of files without the list.
        default: `sliding_window` where it is absent.
        switch: there is `use_sliding_window`, without which no layer has a window.
        pattern: there is `sliding_window_pattern`, which other readers follow.
        from_layer: there is `max_window_layers`: later layers have a window.
    """

    rule: Rule
    default: int | None
    switch: bool = False
    pattern: bool = False
    from_layer: bool = False

    @property
    def theirs(self) -> tuple[str, ...]:
        more = {
            "use_sliding_window": self.switch,
            "sliding_window_pattern": self.pattern,
            "max_window_layers": self.from_layer,
        }
        return ("layer_types", "sliding_window", *(name for name, has in more.items() if has))

    @property
    def ours(self) -> tuple[str, ...]:
        return ("sliding_window",)

    def read(self, given: Given) -> Ours:
        layers = given.layers()
        types = given.take("layer_types", list[str])
        size = given.take("sliding_window", int, self.default, null=None)
        used = given.take("use_sliding_window", bool, False) if self.switch else True
        ruled = self.rule(given, layers)
        if self.from_layer:
            given.take("max_window_layers", int, 28)
        if types is None:
            sliding = ruled if used and size is not None else [False] * layers
        elif len(types) != layers or not set(types) <= {SLIDING, FULL}:
            given.refuse("layer_types", f"is not a {SLIDING} or {FULL} for each layer")
            return {}
        else:
            sliding = [each == SLIDING for each in types]
            if self.pattern and "sliding_window_pattern" in given and sliding != ruled:
                given.refuse("sliding_window_pattern", "says another thing than layer_types")
        if any(sliding) and not used:
            given.refuse("use_sliding_window", f"is false, and layer_types has {SLIDING}")
        elif any(sliding) and (size is None or size < 1):
            given.refuse("sliding_window", "is not a number of tokens of at least 1")
        else:
            return {"sliding_window": windows_of(sliding, size)}
        return {}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        sliding = [window is not None for window in config.windows]
        size = one_size(config, problems)
        written: dict[str, object] = {
            "layer_types": [SLIDING if each else FULL for each in sliding],
            # where there is no switch, their code asks for a size even if no layer has a window
            "sliding_window": size if size is not None or self.switch else self.default,
        }
        if self.switch:
            written["use_sliding_window"] = any(sliding)
        if self.from_layer:
            first = sliding.index(True) if any(sliding) else len(sliding)
            written["max_window_layers"] = first if all(sliding[first:]) else len(sliding)
        if self.pattern and (every := interval_of([not each for each in sliding])):
            written["sliding_window_pattern"] = every
        return written

    def says(self) -> str:
        return "`sliding_window`: one size, any layers"


@dataclass(frozen=True)
class OneWindow(Row):
    """`sliding_window` for all layers (Mistral)."""

    default: int | None

    @property
    def theirs(self) -> tuple[str, ...]:
        return ("sliding_window", "layer_types")

    @property
    def ours(self) -> tuple[str, ...]:
        return ("sliding_window",)

    def read(self, given: Given) -> Ours:
        size = given.take("sliding_window", int, self.default, null=None)
        types = given.take("layer_types", list[str])
        if types is not None and set(types) != {FULL if size is None else SLIDING}:
            given.refuse("layer_types", "differs from sliding_window, which counts for all layers")
        if size is not None and size < 1:
            given.refuse("sliding_window", "is less than 1")
            return {}
        return {"sliding_window": None if size is None else (size,)}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        size = one_size(config, problems)
        if size is not None and None in config.windows:
            problems.refuse("sliding_window", "is not of all layers", f"[{size}]")
        return {"sliding_window": size}

    def says(self) -> str:
        return "`sliding_window`: the same in all layers"


WINDOWS_FROM_LAYER = Windows(_from_layer, 4096, switch=True, from_layer=True)
WINDOWS_WITHOUT_ROPE = Windows(_without_rope, None, switch=True)
WINDOWS_BY_PATTERN = Windows(_by_pattern, 4096, pattern=True)


def windows_of(sliding: list[bool], size: int | None) -> tuple[int, ...] | None:
    """Return `DecoderConfig.sliding_window` for layers that have a window of a size, or none."""
    if not any(sliding) or size is None:
        return None
    return tuple(size if each else -1 for each in sliding)


def one_size(config: DecoderConfig, problems: Problems) -> int | None:
    """Return the size of all windows, None: there are none; several are refused."""
    sizes = sorted({window for window in config.windows if window is not None})
    if len(sizes) > 1:
        problems.refuse("sliding_window", f"has several sizes, {sizes}", f"{sizes[-1]} in all")
    return sizes[-1] if sizes else None


def interval_of(marked: list[bool]) -> int | None:
    """Return n where every n-th layer is marked and no other; more than there are: none is."""
    first = marked.index(True) + 1 if any(marked) else len(marked) + 1
    fits = all(each == ((layer + 1) % first == 0) for layer, each in enumerate(marked))
    return first if fits else None
