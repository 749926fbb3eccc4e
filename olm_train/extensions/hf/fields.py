"""Fields of a config.json and of a decoder's shape: one row says how some of them are each other.

    config.json --ConfigReader--> Row.read of each row --> fields of DecoderConfig | all refused
    DecoderConfig ---------------> Row.write of each row -> config.json             | all refused

A row knows its fields on both sides and nothing else; a family is a tuple of rows. Nothing is
passed over: a field of a config.json that no row read, and that is not known to be harmless, is
refused; so is a field of ours that no row writes and that is not at its default.

Sizes in a config.json that more than a name stands for: heads, and the scale of embeddings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from olm_data.bounded_json import JsonObject
from olm_data.config.convert import as_dict
from olm_data.config.values import put
from olm_data.decoding import convert
from olm_data.errors import printable
from olm_train.model.config import DecoderConfig
from olm_train.model.mixture import MixtureConfig
from olm_train.model.presets import by_name

Json = Mapping[str, object]
"""The content of a config.json."""

Ours = Mapping[str, Any]
"""Fields of `DecoderConfig` by name: `norm` is the name of its kind, `norm.eps` a field of it."""


MOST_LAYERS = 1 << 13
"""As of `DecoderConfig`; no list is made for more."""

REQUIRED = object()
"""Default of a field that must be given."""


@dataclass(frozen=True)
class Problem:
    """A field that stands in the way.

    Attributes:
        field: its name; of theirs when it is read, of ours when it is written.
        why: what is wrong with its value.
        nearest: what it would have to be; None: no value of this field alone helps.
    """

    field: str
    why: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (expressible: {self.nearest})" if self.nearest else ""
        return f"{self.field} {self.why}{hint}"


class Problems(list[Problem]):
    """What stands in the way so far."""

    def refuse(self, field: str, why: str, nearest: object = None) -> None:
        """Add one."""
        hint = None if nearest is None else f"{field}={shown(nearest)}"
        self.append(Problem(field, why, hint))


class ConfigReader:
    """The fields of a config.json, and which of them were looked at.

    Attributes:
        problems: what cannot be expressed.
        seen: names that were read.
    """

    def __init__(self, values: Json) -> None:
        self._values, self.problems = values, Problems()
        self.seen: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def take(self, name: str, kind: Any, default: Any = None, null: Any = REQUIRED) -> Any:
        """Return a field.

        Args:
            name: of the field.
            kind: its type.
            default: of an absent one, and of one that is refused. `REQUIRED`: it must be there.
            null: what null stands for, where that is allowed; it is where the default is None.
        """
        self.seen.add(name)
        if name not in self._values:
            if default is REQUIRED:
                self.refuse(name, "is not given")
            return default
        value = self._values[name]
        if value is None:
            if null is REQUIRED and default is not None:
                self.refuse(name, "is null")
            return default if null is REQUIRED else null
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            return convert(value, kind)
        except msgspec.ValidationError:
            self.refuse(name, f"is {shown(value)}, which is not of the right type")
            return default

    def layers(self) -> int:
        """Return the number of blocks; 0 where it is none that a decoder has."""
        found: int = self.take("num_hidden_layers", int, 0)
        if 1 <= found <= MOST_LAYERS:
            return found
        self.refuse("num_hidden_layers", f"is {found}; a decoder has 1 to {MOST_LAYERS:,}")
        return 0

    def refuse(self, name: str, why: str, nearest: object = None) -> None:
        """Say that a field cannot be expressed."""
        self.problems.refuse(name, why, nearest)

    def unread(self) -> Json:
        """Return the fields that nobody looked at and that have a value."""
        return {
            name: value
            for name, value in self._values.items()
            if name not in self.seen and value is not None
        }


class Row(ABC):
    """Some fields of theirs and of ours that say the same.

    Attributes:
        name: the field of a config.json, where it is one.
        field: the field of `DecoderConfig`, where it is one.
    """

    name: str
    field: str

    @property
    def theirs(self) -> tuple[str, ...]:
        """Fields of a config.json that it reads."""
        return (self.name,)

    @property
    def ours(self) -> tuple[str, ...]:
        """Fields of `DecoderConfig` that it answers for."""
        return (self.field,)

    @property
    def says(self) -> str:
        """What a reader of the reference page needs to know of it."""
        return ", ".join(f"`{name}`" for name in self.ours)

    def read(self, given: ConfigReader) -> Ours:
        """Return fields of ours; what cannot be expressed is refused through `given`."""
        return {}

    @abstractmethod
    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        """Return fields of theirs; what cannot be expressed is added to `problems`."""


@dataclass(frozen=True)
class Number(Row):
    """The same value under two names.

    Attributes:
        name: theirs.
        field: ours.
        kind: int or float.
        default: what an absent field means to them.
        most: larger values are refused by them.
        nullable: null is a value: ours is None.
    """

    name: str
    field: str
    kind: type[int] | type[float] | type[bool]
    default: Any
    most: float | None = None
    nullable: bool = False

    def read(self, given: ConfigReader) -> Ours:
        null = None if self.nullable else REQUIRED
        return {self.field: given.take(self.name, self.kind, self.default, null)}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        value: Any = ours_of(config).get(self.field)
        if self.most is not None and value > self.most:
            problems.refuse(self.field, f"is {value}; it is at most {self.most}", self.most)
        return {self.name: value}


@dataclass(frozen=True)
class FixedValue(Row):
    """A field of theirs that must have one value, because our decoder has no other.

    Attributes:
        name: theirs.
        values: those that mean what our decoder does; the first is written.
        default: what an absent field means to them.
        why: what our decoder does not do.
        written: whether it is written.
    """

    name: str
    values: tuple[object, ...]
    default: object
    why: str
    written: bool = True
    ours = ()

    def read(self, given: ConfigReader) -> Ours:
        value = given.take(self.name, Any, self.default, null=None)
        if not any(value == each and type(value) is type(each) for each in self.values):
            given.refuse(self.name, f"is {shown(value)}: {self.why}", self.values[0])
        return {}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        return {self.name: self.values[0]} if self.written else {}

    @property
    def says(self) -> str:
        return f"must be {' or '.join(f'`{shown(each)}`' for each in self.values)}: {self.why}"


@dataclass(frozen=True)
class WrittenOnly(Row):
    """A field of theirs that says nothing of the model's maths; it is written, never read."""

    name: str
    value: object
    theirs = ours = ()

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        return {self.name: self.value}


@dataclass(frozen=True)
class Always(Row):
    """A field of ours that has one value in all models of a family, and no field of theirs."""

    field: str
    value: object
    theirs = ()

    def read(self, given: ConfigReader) -> Ours:
        return {self.field: self.value}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        value = ours_of(config).get(self.field)
        if value != self.value:
            problems.refuse(self.field, f"is {shown(value)}", shown(self.value))
        return {}

    @property
    def says(self) -> str:
        return f"`{self.field}` is `{shown(self.value)}`"


def ours_of(config: DecoderConfig) -> Ours:
    """Return all fields of a shape by name, as plain values."""
    return by_name(as_dict(config))


def nested(ours: Ours) -> JsonObject:
    """Return fields by name as arguments of `DecoderConfig`."""
    found: JsonObject = {}
    for name in sorted(ours):  # the name of a kind before its fields
        put(found, tuple(name.split(".")), ours[name], where="config.json")
    return found


def shown(value: object) -> str:
    """Return a value of a config.json or of a field as messages and the reference show it."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return printable(text[:60])


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
    """As many keys and values as queries."""

    theirs = ()
    field = "n_kv_heads"
    says = "`n_kv_heads` is `n_heads`"

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        if config.kv_heads != config.n_heads:
            problems.refuse("n_kv_heads", f"is {config.kv_heads}", config.n_heads)
        return {}


@dataclass(frozen=True)
class WholeHeads(Row):
    """Queries are together as wide as the model."""

    theirs = ()
    field = "head_dim"
    says = "`head_dim` is `d_model` / `n_heads`"

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        if config.head_size * config.n_heads != config.d_model:
            problems.refuse("head_dim", f"is {config.head_size}", "d_model / n_heads")
        return {}


def is_root(scale: float, width: int) -> bool:
    """Whether a scale is the square root of a width, as far as fp32 can tell."""
    return math.isclose(scale, width**0.5, rel_tol=1e-7)


@dataclass(frozen=True)
class ExpertCount(Row):
    """`num_experts`, which some versions write as `num_local_experts`."""

    default: int
    theirs = ("num_experts", "num_local_experts")
    field = "feed_forward.n_experts"

    def read(self, given: ConfigReader) -> Ours:
        name, other = self.theirs
        local = given.take(other, int)
        found = given.take(name, int, self.default if local is None else local)
        if local is not None and local != found:
            given.refuse(other, f"is {local}, and {name} is {found}")
        return {self.field: found}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        return {"num_experts": ours_of(config).get(self.field)}


@dataclass(frozen=True)
class NoBias(Row):
    """Nothing but the scores has a say in who is chosen."""

    theirs = ()
    field = "feed_forward.balance"
    says = "`feed_forward.balance` is not `bias`"

    def read(self, given: ConfigReader) -> Ours:
        return {self.field: None}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        balance = ours_of(config).get(self.field)
        if balance is not None and balance["name"] == "bias":
            problems.refuse(
                self.field,
                "is bias, which has a say in who is chosen",
                "null, aux, sequence_aux or global_aux",
            )
        return {}


@dataclass(frozen=True)
class SparseLayers(Row):
    """Which blocks have experts: all but the first ones.

    Attributes:
        default: `intermediate_size` of the others, where it is absent.
    """

    default: int
    theirs = ("mlp_only_layers", "decoder_sparse_step", "intermediate_size")
    ours = ("feed_forward.first_dense", "feed_forward.dense_hidden_size")

    def read(self, given: ConfigReader) -> Ours:
        layers, width = given.layers(), given.take("intermediate_size", int, self.default)
        step = given.take("decoder_sparse_step", int, 1)
        only = given.take("mlp_only_layers", list[int]) or []
        if step < 1:
            given.refuse("decoder_sparse_step", f"is {step}, less than 1")
            return {}
        dense = [layer in only or (layer + 1) % step > 0 for layer in range(layers)]
        first = (*dense, False).index(False)
        if any(dense[first:]) or (dense and first == layers):
            name = "mlp_only_layers" if only else "decoder_sparse_step"
            given.refuse(name, "leaves other blocks without experts than some first ones")
        return dict(zip(self.ours, (first, width if first else None), strict=True))

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        ffn = config.feed_forward
        if not isinstance(ffn, MixtureConfig):
            return {}
        return {
            "mlp_only_layers": [*range(ffn.first_dense)],
            "decoder_sparse_step": 1,
            "intermediate_size": ffn.dense_hidden_size or ffn.top_k * ffn.hidden_size,
        }


SOFTMAX_EXPERTS: tuple[Row, ...] = (
    Always("feed_forward", "moe"),
    Number("num_experts_per_tok", "feed_forward.top_k", int, 8),
    Number("norm_topk_prob", "feed_forward.normalize_scores", bool, False),
    Always("feed_forward.scores", "softmax"),
    Always("feed_forward.score_scale", 1.0),
    Always("feed_forward.shared_hidden_size", None),
    NoBias(),
    WrittenOnly("output_router_logits", False),
)
"""What OLMoE and Qwen 3 MoE share."""
