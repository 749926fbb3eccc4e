"""The mixture manifest: what a user writes by hand in manifest.yaml, read into exact values.

    manifest.yaml --strict_yaml, config.convert--> ManifestKeys --checked together--> Mixture

Numbers are read from the text as integers and fractions; 0.1 is one tenth. Paths are relative to
the manifest's folder. Never: open a dataset or change a value silently. docs/reference/mixture.md
lists every key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from olm_data.config.convert import parse
from olm_data.config.hints import OneOf, Reader, fields_of, hints_of
from olm_data.config.strict_yaml import MAX_INTEGER, Document, load, load_file
from olm_data.config.values import Values
from olm_data.errors import UsageError, printable, quoted
from olm_data.mixture.manifest_values import SequenceLength, Weights, name_of, values_of
from olm_data.mixture.stage_spec import StageKeys, StageSpec, read_groups, read_stages
from olm_data.order.base import OrderKeys
from olm_data.order.orders import DEFAULT, ORDERS, manifest_orders
from olm_data.packing.base import Packing
from olm_data.packing.concat import Concat
from olm_data.packing.packings import PACKINGS, for_order
from olm_data.select.where import parse as parse_condition
from olm_data.storage.objects import LOCATIONS, scheme_of
from olm_data.storage.store import is_remote

T = TypeVar("T", bound=msgspec.Struct)

PackingName = Annotated[str, OneOf(lambda: PACKINGS)]
OrderName = Annotated[str, OneOf(lambda: ORDERS)]

_CONDITION = """where: "score >= 3 and language == 'en'\""""


def _location(kind: str, fix: str) -> Reader:
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

    return Reader(read, f"a path or URL of {kind}", {"type": "string"})


def _condition(text: Any) -> str:
    """Return the condition of a view in its plain spelling."""
    if not isinstance(text, str):
        raise UsageError(
            f"{quoted(text)} is not a condition",
            fix=f"write one over the kept columns: {_CONDITION}",
        )
    try:
        return str(parse_condition(text))
    except UsageError as error:
        raise UsageError(
            f"'{printable(text[:80])}' is not a condition over columns",
            why=error.why,
            fix=f"compare columns with values: {_CONDITION}",
        ) from error


_DATA = _location("a dataset", "write the folder that olm-data tokenize wrote: data: ./tokens/web")
_IDS = _location(
    "a file of ids", "name a text file of ids, one a line: exclude_ids: ./test-ids.txt"
)


@dataclass(frozen=True, kw_only=True)
class SourceKeys:
    """One source as it is written.

    Attributes:
        data: the dataset's folder or URL.
        max_epochs: how often its rows may be drawn in the run.
        where: condition over columns: only these documents are drawn.
        exclude_ids: file of ids, one a line: these documents are left out.
    """

    data: Annotated[str, _DATA]
    max_epochs: Annotated[Fraction, Meta(gt=0)] = Fraction(4)
    where: Annotated[str, Reader(_condition, "a condition", {"type": "string"})] | None = None
    exclude_ids: Annotated[str, _IDS] | None = None


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

    def location(self, source: SourceSpec) -> str:
        """Return the source's dataset as an absolute path or URL."""
        return self.resolve(source.data)

    def resolve(self, path: str) -> str:
        """Return a path or URL of the manifest as an absolute one."""
        return path if is_remote(path) else os.path.abspath(os.path.join(self.folder, path))


def read_mixture(path: str | Path) -> Mixture:
    """Read a manifest file.

    Raises:
        InputError: the file cannot be read.
        UsageError: a key or value is refused; the message has its line.
    """
    return _mixture(load_file(path), os.path.dirname(os.path.abspath(path)))


def parse_mixture(text: str | bytes, path: str = "manifest.yaml", folder: str = ".") -> Mixture:
    """Parse a manifest's text; `path` is for messages, data paths are relative to `folder`."""
    return _mixture(load(text, path), os.path.abspath(folder))


@contextmanager
def located(values: Values, *keys: str | int) -> Iterator[None]:
    """Say of a `UsageError` raised inside where it is wrong, if it does not say so itself."""
    try:
        yield
    except UsageError as error:
        error.where = error.where or values.where(keys)
        raise


def _mixture(document: Document, folder: str) -> Mixture:
    values, orders = values_of(document, folder), manifest_orders()
    if not isinstance(document.value, dict):
        raise values.wrong_type((), ManifestKeys, document.value)
    chosen = _chosen(values, "packing", PACKINGS), _chosen(values, "order", orders)
    keys = parse(_keys_with(*chosen), values)
    sources = tuple(
        SourceSpec(name=name, **vars(source)) for name, source in sorted(keys.sources.items())
    )
    names, views = [source.name for source in sources], [source.view for source in sources]
    with located(values, "order"):
        orders[keys.order].check(keys.packing, views)
    groups = read_groups(values, keys.groups, names)
    packing = _with_given_keys(values, "packing", PACKINGS[keys.packing], keys)
    order = _with_given_keys(values, "order", orders[keys.order], keys)
    return Mixture(
        folder=folder,
        seed=keys.seed,
        sequence_length=keys.sequence_length,
        packing=for_order(packing, order),
        sources=sources,
        stages=read_stages(values, keys.stages, keys.sequence_length, names, groups),
        on_exhausted=keys.on_exhausted,
        order=order,
        values=values,
    )


def _chosen(values: Values, key: str, choices: Mapping[str, type[T]]) -> type[T]:
    """Return the choice `key: NAME`; keys that go with another one only are refused."""
    name = values.data.get(key, next(iter(choices)))
    if not isinstance(name, str) or name not in choices:
        raise values.wrong_type((key,), hints_of(ManifestKeys)[key], name)
    own = {one.name for one in fields_of(choices[name])}
    for other, keys in choices.items():
        for foreign in {one.name for one in fields_of(keys)} - own:
            if foreign in values.data:
                raise UsageError(
                    f"{foreign} has no meaning with {key}: {name}",
                    where=values.where((foreign,)),
                    fix=f"leave it out, or write {key}: {other}",
                )
    return choices[name]


@lru_cache
def _keys_with(*chosen: type[msgspec.Struct]) -> type[ManifestKeys]:
    """Return `ManifestKeys` and the keys that go with the choices; these may be missing."""
    own = [(f.name, hints_of(one)[f.name] | None, None) for one in chosen for f in fields_of(one)]
    return make_dataclass("AllKeys", own, bases=(ManifestKeys,), frozen=True, kw_only=True)


def _with_given_keys(values: Values, key: str, choice: type[T], keys: ManifestKeys) -> T:
    """Return a choice with its keys of the manifest."""
    given = {one.name: getattr(keys, one.name) for one in fields_of(choice)}
    for one in fields_of(choice):
        if given[one.name] is None and one.default is None:
            error = values.missing((one.name,), hints_of(choice)[one.name])
            error.where = values.where((key,))
            raise error
    return choice(**{name: value for name, value in given.items() if value is not None})
