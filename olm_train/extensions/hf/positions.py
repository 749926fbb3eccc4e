"""Positions in a config.json: GPT-2's table, layers without any, and rotary ones in two forms:
`rope_parameters`, and the flat fields it took the place of.

transformers 5 writes one mapping, `rope_parameters`; before it were `rope_theta` and
`rope_scaling`. Both are written, as they say the same; read are both, and refused where they do
not, because readers differ in which they believe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from olm_data.errors import OlmError, printable
from olm_train.extensions.hf.attention import FULL, SLIDING, interval_of
from olm_train.extensions.hf.fields import ConfigReader, Json, Ours, Problems, Row, ours_of, shown
from olm_train.model.config import DecoderConfig
from olm_train.model.positions import RoPEConfig
from olm_train.model.rope import Llama3Scaling, PositionInterpolation, RopeScaling, YaRNScaling

ROPE_FIELDS = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")

_OLD = "old_context_len"
_THEIRS = {_OLD: "original_max_position_embeddings"}
_KINDS: dict[str, type[RopeScaling]] = {
    "linear": PositionInterpolation,
    "llama3": Llama3Scaling,
    "yarn": YaRNScaling,
}
_WRITTEN = {
    "linear": ("factor",),
    "llama3": ("factor", _OLD, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _OLD, "beta_fast", "beta_slow", "attention_factor"),
}
"""Fields of ours, by kind; theirs have the same names but for `_THEIRS`."""
Stretch = tuple[float | None, RopeScaling | None]
"""Base, None where it is not named, and scaling of some layers."""


@dataclass(frozen=True)
class TableSize(Row):
    """`n_positions`: entries of the table of positions."""

    default: int
    name = "n_positions"
    ours = ("positions.max_positions", "positions")
    says = "`positions.max_positions`; `positions` is `learned`"

    def read(self, given: ConfigReader) -> Ours:
        size = given.take("n_positions", int, self.default)
        return {"positions": "learned", "positions.max_positions": size}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        if (kind := ours_of(config)["positions"]) != "learned":
            problems.refuse("positions", f"is {kind}", "learned")
        size = config.max_positions
        return {"n_positions": size, "n_ctx": size}  # the old name, which mlx-lm needs


@dataclass(frozen=True)
class NoRope(Row):
    """`no_rope_layers`: 0 for a layer without positions; such a layer comes every so many."""

    interval: int
    theirs = ("no_rope_layers", "no_rope_layer_interval")
    field = "positions.no_rope_layer_interval"

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
        return {self.field: every}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        every = ours_of(config).get(self.field) or config.n_layers + 1
        return {
            "no_rope_layers": [int((n + 1) % every != 0) for n in range(config.n_layers)],
            "no_rope_layer_interval": every,
        }


@dataclass(frozen=True)
class EqualRope(Row):
    """The same rotary positions in all layers that have them.

    Attributes:
        theta: base where none is given.
        positions: `max_position_embeddings` where none is given: a scaling that does not name its
            old context means that.
    """

    theta: float
    positions: int
    theirs = ROPE_FIELDS
    ours = ("positions.theta", "positions.scaling", "positions")
    says = "`positions.theta`, `positions.scaling`; both forms are written"

    def read(self, given: ConfigReader) -> Ours:
        refuse_partial(given)
        old = old_context(given, self.positions)
        flat = given.take("rope_theta", float)
        nested = given.take("rope_parameters", dict[str, Any])
        scaling = given.take("rope_scaling", dict[str, Any])
        found = stretch(given, "rope_parameters", nested, old) if nested else None
        before = stretch(given, "rope_scaling", scaling, old) if scaling else None
        theta = agreed(
            given,
            "rope_theta",
            [flat, *(each[0] for each in (found, before) if each is not None)],
        )
        if found and before and found[1] != before[1]:
            given.refuse("rope_scaling", "says another scaling than rope_parameters")
        alone = flat is None and before and before[0] is None  # then the default counts
        if alone and theta not in (None, self.theta):
            given.refuse("rope_theta", "is in rope_parameters alone, beside rope_scaling", theta)
        chosen = before or found
        return {
            "positions": "rope",
            "positions.theta": self.theta if theta is None else theta,
            "positions.scaling": chosen[1] if chosen else None,
        }

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        rope = rope_of(config, problems)
        return {
            "rope_parameters": parameters(rope.theta, rope.scaling),
            "rope_theta": rope.theta,
            "rope_scaling": old_form(rope.scaling),
        }


@dataclass(frozen=True)
class LayerRope(Row):
    """One base and scaling for layers without a window, a base for those with one.

    Attributes:
        theta: base of layers without a window, where none is given.
        windowed: base of those with one, where none is given.
        local: the flat field of that base; None: there is none, and both bases are the same.
        positions: as of `EqualRope`.
    """

    theta: float
    windowed: float
    local: str | None
    positions: int

    @property
    def theirs(self) -> tuple[str, ...]:
        return (*ROPE_FIELDS, *((self.local,) if self.local else ()))

    @property
    def ours(self) -> tuple[str, ...]:
        fields = ("theta", "scaling", "scaling_windowed")
        local = ("theta_windowed",) if self.local else ()
        return (*(f"positions.{field}" for field in (*fields, *local)), "positions")

    def read(self, given: ConfigReader) -> Ours:
        refuse_partial(given)
        old = old_context(given, self.positions)
        flat = given.take("rope_theta", float)
        local = given.take(self.local, float) if self.local else None
        older = given.take("rope_scaling", dict[str, Any])
        if older and "rope_type" not in older:  # transformers puts it over a rope_type of "default"
            given.refuse("rope_scaling.rope_type", "is not given; the older type is not read here")
        nested = given.take("rope_parameters", dict[str, Any]) or {}
        if older and nested and not nested.get(FULL):
            given.refuse(f"rope_parameters.{FULL}", "is not given, beside rope_scaling")
        found: dict[str, Stretch] = {
            "rope_scaling": stretch(given, "rope_scaling", older or {}, old)
        }
        for kind in (FULL, SLIDING):
            values = nested.get(kind) or {}
            if not isinstance(values, dict):
                given.refuse(f"rope_parameters.{kind}", "is no mapping")
                values = {}
            found[kind] = stretch(given, f"rope_parameters.{kind}", values, old)
        for name in nested.keys() - {FULL, SLIDING}:
            given.refuse(f"rope_parameters.{printable(name)}", f"is neither {FULL} nor {SLIDING}")
        if found[SLIDING][1] is not None:
            given.refuse(f"rope_parameters.{SLIDING}", "scales layers with a window", "default")
        scaling = found[FULL][1]
        if older and nested.get(FULL) and scaling != found["rope_scaling"][1]:
            given.refuse("rope_scaling", "says another scaling than rope_parameters")
        theta = agreed(given, "rope_theta", [flat, found[FULL][0], found["rope_scaling"][0]])
        windowed = agreed(given, self.local or "rope_theta", [local, found[SLIDING][0]])
        if theta is None and self.local is None:
            given.refuse("rope_theta", "is not given; transformers 4 then takes 10000, 5 500000")
        theta = self.theta if theta is None else theta
        windowed = self.windowed if windowed is None else windowed
        if self.local is None and theta != windowed:
            given.refuse(
                "rope_theta",
                f"is {theta}; that of layers with a window is {windowed} by rope_parameters or, "
                "without it, by transformers 5",
                "the same in both of rope_parameters",
            )
        return {
            "positions": "rope",
            "positions.theta": theta,
            "positions.theta_windowed": windowed,
            "positions.scaling": found["rope_scaling"][1] if scaling is None else scaling,
            "positions.scaling_windowed": False,
        }

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        rope = rope_of(config, problems)
        theta, scaling = rope.theta, rope.scaling
        windowed = rope.theta_windowed or theta
        if scaling is not None and config.attention.sliding_window and rope.scaling_windowed:
            problems.refuse("positions.scaling_windowed", "is true", False)
        return {
            "rope_parameters": {
                FULL: parameters(theta, scaling),
                SLIDING: parameters(windowed, None),
            },
            "rope_theta": theta,
            "rope_scaling": old_form(scaling),
            **({self.local: windowed} if self.local else {}),
        }

    @property
    def says(self) -> str:
        second = ", `positions.theta_windowed`" if self.local else ""
        scaling = "`positions.scaling` with `scaling_windowed: false`"
        return f"`positions.theta`{second}, {scaling}; both forms are written"


def rope_of(config: DecoderConfig, problems: Problems) -> RoPEConfig:
    """Return the rotary positions; others are refused.

    So is a YaRN whose ramp is empty: they and we then differ in what is stretched.
    """
    if (kind := ours_of(config)["positions"]) != "rope":
        problems.refuse("positions", f"is {kind}", "rope")
    rope = config.positions if isinstance(config.positions, RoPEConfig) else RoPEConfig()
    scaling = rope.scaling
    if isinstance(scaling, YaRNScaling) and config.head_size >= 2:
        first, last = scaling.ramp(config.head_size, rope.theta)
        if first > last:
            problems.refuse(
                "positions.scaling",
                f"has an old_context_len of {scaling.old_context_len}, in which no pair of "
                "theta and head_dim turns between beta_slow and beta_fast times",
            )
    return rope


def parameters(theta: float, scaling: RopeScaling | None) -> Json:
    """Return `rope_parameters` for a base and a scaling."""
    return {"rope_theta": theta, **(old_form(scaling) or {"rope_type": "default"})}


def old_form(scaling: RopeScaling | None) -> Json | None:
    """Return `rope_scaling` for a scaling."""
    if scaling is None:
        return None
    kind = next(name for name, each in _KINDS.items() if isinstance(scaling, each))
    fields = {_THEIRS.get(field, field): getattr(scaling, field) for field in _WRITTEN[kind]}
    return {"rope_type": kind, **fields}


def refuse_partial(given: ConfigReader) -> None:
    """Refuse heads of which only a part is rotated."""
    if given.take("partial_rotary_factor", float, 1.0, null=1.0) != 1.0:
        given.refuse("partial_rotary_factor", "rotates a part of each head", 1.0)


def old_context(given: ConfigReader, positions: int) -> int:
    """Return the old context of a scaling that does not name one."""
    return given.take("max_position_embeddings", int, positions, null=positions)


def agreed(given: ConfigReader, field: str, thetas: list[float | None]) -> float | None:
    """Return the base that all of them say, None: none says one."""
    named = [theta for theta in thetas if theta is not None]
    if len(set(named)) > 1:
        said = " and ".join(str(theta) for theta in dict.fromkeys(named))
        given.refuse(field, f"is given twice, {said}, and readers differ in which counts")
    return named[0] if named else None


def stretch(given: ConfigReader, where: str, values: Json, old: int) -> Stretch:
    """Return base (None: not named) and scaling of a mapping; refuse what cannot be expressed.

    Args:
        where: name of the mapping.
        old: tokens of the longest documents before, where it does not say.
    """
    inner = ConfigReader({key: value for key, value in values.items() if key != "type"})
    kind = inner.take("rope_type", str, values.get("type", "default"))
    if values.get("type", kind) != kind:
        inner.refuse("type", f"is {shown(values['type'])}; readers differ in which counts", kind)
    theta = inner.take("rope_theta", float)
    scaling: RopeScaling | None = None
    refuse_partial(inner)
    if kind not in ("default", *_KINDS):
        known = " or ".join(("default", *_KINDS))
        inner.refuse("rope_type", f"is {shown(kind)}", known)
        given.problems += inner.problems
        return theta, None
    try:
        scaling = _scaling(inner, kind, old)
    except OlmError as error:  # of its class, or of a field of it
        of_class = error.where in {each.__name__ for each in _KINDS.values()}
        field, _, why = (error.what if of_class else f"{error.where} {error.what}").partition(" ")
        inner.refuse(_THEIRS.get(field, field), why)
    for name in inner.unread():
        inner.refuse(name, f"is not known of rope_type {kind}")
    for problem in inner.problems:
        given.refuse(f"{where}.{problem.field}", problem.why)
    return theta, scaling


def _scaling(inner: ConfigReader, kind: str, old: int) -> RopeScaling | None:
    if kind == "default":
        return None
    taken = {"factor": inner.take("factor", float)}
    if kind != "linear":
        taken[_OLD] = inner.take(_THEIRS[_OLD], int, old, null=old)
    if kind == "llama3":
        taken |= {f: inner.take(f, float) for f in ("low_freq_factor", "high_freq_factor")}
    elif kind == "yarn":
        taken["beta_fast"] = inner.take("beta_fast", float) or 32.0
        taken["beta_slow"] = inner.take("beta_slow", float) or 1.0
        if inner.take("truncate", bool, True, null=True) is False:
            inner.refuse("truncate", "is false: where pairs begin to be stretched is rounded", True)
    found = _KINDS[kind](**taken)
    if isinstance(found, YaRNScaling):
        _check_attention_factor(inner, found)
    return found


def _check_attention_factor(inner: ConfigReader, scaling: YaRNScaling) -> None:
    """Refuse another sharpening of attention than the one that YaRN's paper gives the factor."""
    said = inner.take("attention_factor", float)
    one, all_dim = inner.take("mscale", float), inner.take("mscale_all_dim", float)
    if said is None and one and all_dim:
        log = 0.1 * math.log(scaling.factor)
        said = (one * log + 1) / (all_dim * log + 1)
    if said is not None and not math.isclose(said, scaling.attention_factor, rel_tol=1e-6):
        inner.refuse(
            "attention_factor", f"comes to {said}", f"{scaling.attention_factor}, from the factor"
        )
