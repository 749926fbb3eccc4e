"""The mixture manifest: what a user writes by hand in manifest.yaml, read into exact values.

    manifest.yaml --strict_yaml--> keys and values checked, with lines --> Mixture

Numbers are read from the text as integers and fractions; 0.1 is one tenth. Paths are relative to
the manifest's folder. Never: open a dataset or change a value silently. docs/reference/mixture.md
lists every key.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path

from olm_data.config.strict_yaml import MAX_INTEGER, Document, check_keys, load, load_file
from olm_data.errors import UsageError, printable, quoted
from olm_data.mixture.manifest_values import (
    MAX_SEQUENCE_LENGTH,
    check_name,
    choice_at,
    integer_at,
    mapping_at,
    number_at,
    value_at,
)
from olm_data.mixture.named_choice import keys_of, read_choice
from olm_data.mixture.stage_spec import EXAMPLE, StageSpec, parse_groups, parse_stages
from olm_data.order.base import OrderKeys
from olm_data.order.orders import manifest_orders
from olm_data.packing.base import Packing
from olm_data.packing.packings import PACKINGS, for_order
from olm_data.select.where import parse
from olm_data.storage.store import is_remote

DEFAULT_MAX_EPOCHS = Fraction(4)
ON_EXHAUSTED = ("error", "cap_and_redistribute")

_DATA_FIX = "write the folder that olm-data tokenize wrote: data: ./tokens/web"
_IDS_FIX = "name a text file of ids, one a line: exclude_ids: ./test-ids.txt"


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One source: `data` is the dataset's folder or URL as written in the manifest.

    `where` (a condition) and `exclude_ids` (a file of ids, as written) make a view of it.
    """

    name: str
    data: str
    max_epochs: Fraction
    where: str | None = None
    exclude_ids: str | None = None

    @property
    def view(self) -> bool:
        """Whether it draws on some of the documents only."""
        return self.where is not None or self.exclude_ids is not None


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
    document: Document = field(repr=False, compare=False)

    def where(self, *keys: str | int) -> str:
        """Return `path:line` of a key path of the manifest."""
        return self.document.where(*keys)

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


def _mixture(document: Document, folder: str) -> Mixture:
    top, orders = mapping_at(document, ()), manifest_orders()
    check_keys(
        top,
        (
            "version",
            "seed",
            "sequence_length",
            "packing",
            *keys_of(PACKINGS.values()),
            "sources",
            "groups",
            "stages",
            "on_exhausted",
            "order",
            *keys_of(orders.values()),
        ),
        document.where,
    )
    for key, example in (
        ("version", "version: 1"),
        ("sequence_length", "sequence_length: 2048"),
        ("sources", "sources:\n      web: {data: ./tokens/web}"),
        ("stages", EXAMPLE),
    ):
        if key not in top:
            raise UsageError(
                f"the key {key!r} is missing", where=document.where(), fix=f"add\n    {example}"
            )
    integer_at(document, ("version",), 1, 1)
    sources = _sources(document)
    names = [source.name for source in sources]
    packing = read_choice(document, "packing", PACKINGS)
    views = [source.view for source in sources]
    order = read_choice(document, "order", orders, lambda one: one.check(packing.name, views))
    return Mixture(
        folder=folder,
        seed=integer_at(document, ("seed",), 0, MAX_INTEGER) if "seed" in top else 0,
        sequence_length=integer_at(document, ("sequence_length",), 1, MAX_SEQUENCE_LENGTH),
        packing=for_order(packing, order),
        sources=sources,
        stages=parse_stages(document, folder, names, parse_groups(document, names)),
        on_exhausted=choice_at(document, "on_exhausted", ON_EXHAUSTED),
        order=order,
        document=document,
    )


def _sources(document: Document) -> tuple[SourceSpec, ...]:
    sources = []
    for name in sorted(mapping_at(document, ("sources",))):
        keys = ("sources", name)
        check_name(name, "source", document.where(*keys))
        spec = mapping_at(document, keys)
        check_keys(
            spec,
            ("data", "max_epochs", "where", "exclude_ids"),
            partial(document.where, *keys),
            required=("data",),
        )
        epochs = DEFAULT_MAX_EPOCHS
        if "max_epochs" in spec:
            epochs = number_at(document, (*keys, "max_epochs"))
            if epochs <= 0:
                raise UsageError(
                    "max_epochs must be more than 0", where=document.where(*keys, "max_epochs")
                )
        sources.append(
            SourceSpec(
                name=name,
                data=_place(document, (*keys, "data"), "a dataset", _DATA_FIX),
                max_epochs=epochs,
                where=_condition(document, (*keys, "where")) if "where" in spec else None,
                exclude_ids=_place(document, (*keys, "exclude_ids"), "a file of ids", _IDS_FIX)
                if "exclude_ids" in spec
                else None,
            )
        )
    return tuple(sources)


def _place(document: Document, keys: tuple[str | int, ...], kind: str, fix: str) -> str:
    """Return a path or URL; what would store a secret or forge a message is refused."""
    where = document.where(*keys)
    data = value_at(document, keys)
    if not isinstance(data, str) or not data or not data.isprintable():
        raise UsageError(f"{quoted(data)} is not a path or URL of {kind}", where=where, fix=fix)
    if is_remote(data) and ("?" in data or "@" in data.split("://", 1)[1].split("/", 1)[0]):
        raise UsageError(
            "a URL with a user, password or query is not allowed here",
            where=where,
            why="the lock records the URL, and a secret in it would be copied with every run",
            fix="give the plain URL, and the credentials by the environment",
        )
    return data.removeprefix("file://")


def _condition(document: Document, keys: tuple[str | int, ...]) -> str:
    """Return the condition of a view in its plain spelling."""
    text = value_at(document, keys)
    if not isinstance(text, str):
        raise UsageError(
            f"{quoted(text)} is not a condition",
            where=document.where(*keys),
            fix="""write one over the kept columns: where: "score >= 3 and language == 'en'\"""",
        )
    try:
        return str(parse(text))
    except UsageError as error:
        raise UsageError(
            f"'{printable(text[:80])}' is not a condition over columns",
            where=document.where(*keys),
            why=error.why,
            fix="""compare columns with values: where: "score >= 3 and language == 'en'\"""",
        ) from error
