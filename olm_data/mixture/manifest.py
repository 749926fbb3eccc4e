"""The mixture manifest: what a user writes by hand in manifest.yaml, read into exact values.

    manifest.yaml --config.convert--> ManifestKeys --checked together--> Mixture

Numbers are read from the text as integers and fractions; 0.1 is one tenth. Paths are relative to
the manifest's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from olm_data.config.convert import fields_of, parse
from olm_data.config.hints import OneOf, ReadBy
from olm_data.config.strict_yaml import MAX_INTEGER
from olm_data.config.values import Values
from olm_data.errors import UsageError, quoted
from olm_data.mixture.lock_format import LOSS_UNITS, MAX_LOSS_WEIGHT, is_loss_weight
from olm_data.mixture.stage_spec import (
    SequenceLength,
    StageKeys,
    StageSpec,
    Weights,
    name_of,
    read_stages,
)
from olm_data.order.base import OrderKeys
from olm_data.order.orders import DEFAULT, ORDERS, manifest_orders
from olm_data.packing.base import Packing
from olm_data.packing.concat import Concat
from olm_data.packing.packings import PACKINGS, for_order
from olm_data.select.where import Condition
from olm_data.storage.objects import LOCATIONS, scheme_of
from olm_data.storage.store import is_remote

if TYPE_CHECKING:
    from olm_data.mixture.lock import Lock

T = TypeVar("T", bound=msgspec.Struct)

PackingName = Annotated[str, OneOf(lambda: PACKINGS)]
OrderName = Annotated[str, OneOf(lambda: ORDERS)]


def _location(kind: str, fix: str) -> ReadBy:
    """Return the annotation of a path or URL; what would store a secret is refused."""

    def read(data: Any) -> str:
        if not isinstance(data, str) or not data or not data.isprintable():
            raise UsageError(f"{quoted(data)} is not a path or URL of {kind}", fix=fix)
        if is_remote(data) and scheme_of(data) not in LOCATIONS:
            raise UsageError(
                f"{kind} cannot be at {scheme_of(data)}://",
                fix=f"use a local path or one of {', '.join(f'{name}://' for name in LOCATIONS)}",
            )
        if is_remote(data) and ("?" in data or "@" in data.split("://", 1)[1].split("/", 1)[0]):
            raise UsageError(
                "a URL with a user, password or query is not allowed here",
                why="the lock records the URL, and a secret in it would be copied with every run",
                fix="give the plain URL, and the credentials by the environment",
            )
        return data.removeprefix("file://")

    return ReadBy(read, f"a path or URL of {kind}", {"type": "string"})


SCHEMA = Path(__file__).with_name("mixture.schema.json")
"""What editors complete and check a manifest with; `docs/schemas.py` makes it of these types."""

_DATA = _location("a dataset", "write the folder that olm-data tokenize wrote: data: ./tokens/web")
_IDS = _location(
    "a file of ids", "name a text file of ids, one a line: exclude_ids: ./test-ids.txt"
)


def _loss_weight(data: Any) -> Fraction:
    if type(data) in (int, Fraction) and is_loss_weight(weight := Fraction(data)):
        return weight
    raise UsageError(
        f"{quoted(data)} is no loss weight",
        fix=f"give a number above 0 and up to {MAX_LOSS_WEIGHT:,}, of three decimals at most",
    )


_LOSS_WEIGHT = ReadBy(
    _loss_weight,
    "a loss weight",
    {"type": "number", "minimum": 1 / LOSS_UNITS, "maximum": MAX_LOSS_WEIGHT},
)


@dataclass(frozen=True, kw_only=True)
class SourceKeys:
    """One source as it is written.

    Attributes:
        data: the dataset's folder or URL.
        max_epochs: how often its rows may be drawn in the run.
        where: condition over columns: only these documents are drawn.
        exclude_ids: file of ids, one a line: these documents are left out.
        loss_weight: what the loss of one of its tokens is multiplied by; three decimals at most.
    """

    data: Annotated[str, _DATA]
    max_epochs: Annotated[Fraction, Meta(gt=0)] = Fraction(4)
    where: Condition | None = None
    exclude_ids: Annotated[str, _IDS] | None = None
    loss_weight: Annotated[Fraction, _LOSS_WEIGHT] = Fraction(1)


@dataclass(frozen=True, kw_only=True)
class SourceSpec(SourceKeys):
    """One source: `data` is the dataset's folder or URL as written in the manifest.

    `where` (a condition) and `exclude_ids` (a file of ids, as written) make a view of it.
    """

    name: str

    @property
    def view(self) -> bool:
        """Whether it draws on some of the documents only."""
        return self.where is not None or self.exclude_ids is not None


@dataclass(frozen=True, kw_only=True)
class ManifestKeys:
    """A manifest as it is written, but for the keys that go with its packing and order.

    Attributes:
        version: of this format.
        seed: of the order of the rows.
        sequence_length: tokens of a row.
        packing: how documents become rows.
        sources: datasets by name.
        groups: weights of sources and groups under one name.
        stages: in the order of the run.
        on_exhausted: what happens where a source has too few rows.
        order: in which rows come.
    """

    version: Annotated[int, Meta(ge=1, le=1, examples=["1"])]
    seed: Annotated[int, Meta(ge=0, le=MAX_INTEGER)] = 0
    sequence_length: Annotated[SequenceLength, Meta(examples=["2048"])]
    packing: PackingName = Concat.name
    sources: Annotated[
        dict[Annotated[str, name_of("source")], SourceKeys],
        Meta(min_length=1, examples=["\n      web: {data: ./tokens/web}"]),
    ]
    groups: Annotated[dict[Annotated[str, name_of("group")], Weights], Meta(min_length=1)] = field(
        default_factory=dict
    )
    stages: Annotated[
        list[StageKeys],
        Meta(
            min_length=1,
            examples=["\n      - {name: main, tokens: 1B, weights: {web: 85, code: 15}}"],
        ),
    ]
    on_exhausted: Literal["error", "cap_and_redistribute"] = "error"
    order: OrderName = DEFAULT.name


@dataclass(frozen=True, kw_only=True)
class LikeSourceKeys:
    """A source of another lock with other tokens; `data` is its folder or URL."""

    data: Annotated[str, _DATA]


@dataclass(frozen=True, kw_only=True)
class LikeKeys:
    """A manifest for `mix --like`: what the other lock does not decide.

    Attributes:
        version: of this format.
        sequence_length: tokens of a row; None: as there.
        packing: how documents become rows; None: as there.
        sources: datasets by name, with the documents of those there.
    """

    version: Annotated[int, Meta(ge=1, le=1, examples=["1"])]
    sequence_length: SequenceLength | None = None
    packing: Literal["concat", "document"] | None = None
    sources: Annotated[
        dict[Annotated[str, name_of("source")], LikeSourceKeys],
        Meta(min_length=1, examples=["\n      web: {data: ./tokens/web}"]),
    ]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A parsed manifest. Sources are in order of their names, stages in the order of the run."""

    folder: str
    seed: int
    sequence_length: int
    packing: Packing
    sources: tuple[SourceSpec, ...]
    stages: tuple[StageSpec, ...]
    on_exhausted: str
    order: OrderKeys
    values: Values = field(repr=False, compare=False)

    def where(self, *keys: str | int) -> str:
        """Return `path:line` of a key path of the manifest."""
        return self.values.where(keys)

    def resolve(self, path: str) -> str:
        """Return a path or URL of the manifest as an absolute one."""
        return path if is_remote(path) else os.path.abspath(os.path.join(self.folder, path))


def read_mixture(path: str | Path, after: Lock | None = None) -> Mixture:
    """Read a manifest file.

    Args:
        after: the lock of a run that goes on with it: what of the run the manifest leaves out.

    Raises:
        UsageError: it cannot be read; a key or value is refused, the message has its line.
        InputError: a file with weights cannot be read.
    """
    values = Values.read(path, example="manifest.yaml", numbers="exact", digits_only=True)
    return mixture_of(values if after is None else filled_in(values, after))


def mixture_like(path: str | Path, old: Lock) -> Mixture:
    """Read a manifest for `mix --like`: sources with the documents of a lock, without stages.

    Raises:
        UsageError: it cannot be read, says what the lock decides, or names other sources.
    """
    values = Values.read(path, example="manifest.yaml", numbers="exact", digits_only=True)
    decided = (fields_of(ManifestKeys).keys() - fields_of(LikeKeys).keys()) & values.data.keys()
    if decided:
        key = min(decided)
        raise UsageError(
            f"--like takes {key} from the lock", where=values.where((key,)), fix="leave it out"
        )
    keys = parse(LikeKeys, values)
    drawn = {s.name: s for i, s in enumerate(old.sources) if old.rows_drawn(i)}
    if keys.sources.keys() != drawn.keys():
        raise UsageError(
            f"the lock draws on {', '.join(drawn)}, and this manifest names "
            + ", ".join(sorted(keys.sources)),
            where=values.where(("sources",)),
            fix="name just the sources of the lock",
        )
    length, packing = keys.sequence_length or old.sequence_length, keys.packing or old.packing.name
    if packing not in ("concat", "document"):
        raise UsageError(
            f"packing: {packing} of the lock puts documents in another order",
            where=values.where(()),
            fix="write packing: concat or packing: document",
        )
    if length != old.sequence_length and any(stage.sequence_length for stage in old.stages):
        raise UsageError(
            f"stages of the lock have shorter rows, parts of {old.sequence_length:,} tokens",
            where=values.where(("sequence_length",)),
            fix="leave sequence_length out",
        )
    return Mixture(
        folder=os.path.abspath(values.folder),
        seed=old.seed,
        sequence_length=length,
        packing=PACKINGS[packing](),
        sources=tuple(
            SourceSpec(
                name=name,
                data=keys.sources[name].data,
                max_epochs=Fraction(1),
                loss_weight=Fraction(source.loss_weight or 1),
            )
            for name, source in drawn.items()
        ),
        stages=(),
        on_exhausted="error",
        order=DEFAULT(),
        values=values,
    )


def filled_in(values: Values, lock: Lock) -> Values:
    """Return the values of a manifest with what it leaves out of the run and the lock knows."""
    known = {key: getattr(lock, key) for key in ("seed", "sequence_length")}
    known |= {"packing": lock.packing.name}
    if "order" not in values.data:
        keys = fields_of(manifest_orders()[lock.order.name]).keys()
        known |= {"order": lock.order.name}
        known |= {key: getattr(lock.order, key) for key in keys & {*lock.order.__struct_fields__}}
    for key, value in known.items():
        if key not in values.data:
            values.give((key,), value, "the lock")
    return values


@contextmanager
def located(values: Values, *keys: str | int) -> Iterator[None]:
    """Say of a `UsageError` raised inside where it is wrong, if it does not say so itself."""
    try:
        yield
    except UsageError as error:
        error.where = error.where or values.where(keys)
        raise


def mixture_of(values: Values) -> Mixture:
    """Return the mixture that values of a manifest say; raises as `read_mixture`."""
    orders = manifest_orders()
    packing = _chosen(values, "packing", PACKINGS)
    order = _chosen(values, "order", orders)
    keys = parse(_keys_with(packing, order), values)
    sources = tuple(
        SourceSpec(name=name, **vars(source)) for name, source in sorted(keys.sources.items())
    )
    names = [source.name for source in sources]
    with located(values, "order"):
        order.check(keys.packing, [source.view for source in sources])
    order_keys = _of(order, keys)
    return Mixture(
        folder=os.path.abspath(values.folder),
        seed=keys.seed,
        sequence_length=keys.sequence_length,
        packing=for_order(_of(packing, keys), order_keys),
        sources=sources,
        stages=read_stages(values, keys.stages, keys.sequence_length, names, keys.groups),
        on_exhausted=keys.on_exhausted,
        order=order_keys,
        values=values,
    )


def _chosen(values: Values, key: str, choices: Mapping[str, type[T]]) -> type[T]:
    """Return the choice `key: NAME`, or any for what is none, which `parse` refuses.

    Keys that go with another choice only are refused.
    """
    default = next(iter(choices))
    name = values.data.get(key, default)
    if not isinstance(name, str) or name not in choices:
        return choices[default]
    own = fields_of(choices[name]).keys()
    for other, keys in choices.items():
        for foreign in fields_of(keys).keys() - own:
            if foreign in values.data:
                raise UsageError(
                    f"{foreign} has no meaning with {key}: {name}",
                    where=values.where((foreign,)),
                    fix=f"leave it out, or write {key}: {other}",
                )
    return choices[name]


def _of(choice: type[T], keys: ManifestKeys) -> T:
    """Return a choice with its keys of the manifest."""
    return choice(**{name: getattr(keys, name) for name in fields_of(choice)})


@lru_cache
def _keys_with(*chosen: type[msgspec.Struct]) -> type[ManifestKeys]:
    """Return `ManifestKeys` and the keys that go with the choices."""
    own = [
        (name, one.hint)
        if one.default is None
        else (name, one.hint, field(default_factory=one.default))
        for kind in chosen
        for name, one in fields_of(kind).items()
    ]
    return make_dataclass("AllKeys", own, bases=(ManifestKeys,), frozen=True, kw_only=True)
