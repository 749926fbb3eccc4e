"""Sources of one's own, by import path: `my_lab.parts:MySource`, or by a package's entry point.

    name --own_path, load_class--> class --parts--> an input each --rows--> tables -> documents

An input of such a source names its class, so whoever reads it imports the class. Where the name
may have come with a file of somebody else's, `refuse_untrusted` goes before any reading.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pyarrow as pa

from olm_data.config.convert import fields_of, parse
from olm_data.config.import_path import is_import_path, load_class
from olm_data.config.values import Values
from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.errors import InputError, UsageError, printable
from olm_data.plugins import path_of
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.hub import units as units  # a part is one, as a shard there
from olm_data.sources.rows import NoRow, Row, columns_of, documents_of, running, tables_of

GROUP = "olm_data.sources"
"""Entry points of packages that have sources."""

OPTIONS = ("subset", "root", "split")
"""Options of a command that are fields of the class, where it has them."""

_SCHEME = "own:"


@dataclass(frozen=True, kw_only=True)
class OwnSource(ABC):
    """Where text comes from, in parts that are read by themselves.

    A class of one's own is a frozen dataclass; the fields `subset`, `root` and `split`, where it
    has them, are the options of those names.
    """

    @abstractmethod
    def parts(self) -> Iterable[str]:
        """Return the names of the parts, in reading order: each is an input of the dataset."""

    @abstractmethod
    def rows(self, part: str) -> Iterable[Row]:
        """Yield the rows of a part: the same ones in the same order each time, in any process."""

    def size(self, part: str) -> int:
        """Return the bytes of text of a part, about; 0: not known."""
        return 0

    def revision(self, part: str) -> str:
        """Return what changes when the rows of a part may have changed."""
        return ""


def own_path(name: str) -> str | None:
    """Return the import path that a source's name is, or is short for; None: it is another's."""
    return name if is_import_path(name) and not name.startswith("hf:") else path_of(GROUP, name)


def list_inputs(path: str, options: Mapping[str, str]) -> tuple[InputFile, ...]:
    """Return an input for each part of a source.

    Args:
        path: of its class.
        options: of `OPTIONS`, those that were given.

    Raises:
        UsageError: no such class, or an option that it has no field for.
        InputError: it fails, or gives a name twice.
    """
    source = _made(path, options, f"--source {path}")
    with running(f"the source {path}", "parts"):
        parts = list(source.parts())
        sizes = [(source.size(part), source.revision(part)) for part in parts]
    given = "".join(f",{name}={value}" for name, value in sorted(options.items()))
    return tuple(
        InputFile(
            path=f"{path}{given}/{part}",
            url=_SCHEME + urlencode({**options, "class": path, "part": part}),
            bytes=size,
            revision=revision,
            format="own",
            position="row",
        )
        for part, (size, revision) in zip(parts, sizes, strict=True)
    )


def current_revision(input: InputFile) -> str:
    """Return what the revision of a part is now."""
    path, part, options = _place(input)
    with running(f"the source {path}", part):
        return _made(path, options, input.path).revision(part)


def read(scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of a part.

    Raises:
        InputError: there is no such text column, or the source fails.
    """
    yield from documents_of(_tables(scan.input, scan.options), scan)


def columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Return the columns of a part's first rows. Raises as `table_schema`."""
    return columns_of(_tables(input, options), input, options)


def refuse_untrusted(inputs: Iterable[InputFile], where: str) -> None:
    """Refuse inputs that name a class, in a file that may be somebody else's.

    Raises:
        InputError: one does; nothing was imported.
    """
    for item in inputs:
        if item.format == "own":
            raise untrusted(_place(item)[0], where)


def untrusted(path: str, where: str) -> InputError:
    """Return the error of a class that a file names which is not trusted."""
    return InputError(
        f"this names a class of somebody's own: {printable(path)[:80]}",
        where=where,
        why="it came with a dataset, and an import runs code",
        fix="if you trust whoever made it and have the package of that name installed: --trust",
    )


def _tables(input: InputFile, options: ReadOptions) -> Iterator[pa.RecordBatch | NoRow]:
    path, part, given = _place(input)
    source = _made(path, given, input.path)
    return tables_of(lambda: source.rows(part), f"the source {path}", input, options.text_column)


def _place(input: InputFile) -> tuple[str, str, dict[str, str]]:
    """Return the class, the part and the options that an input names."""
    found = dict(parse_qsl(input.url.removeprefix(_SCHEME), keep_blank_values=True))
    try:
        return found.pop("class"), found.pop("part"), found
    except KeyError as error:
        raise InputError("it names no part of a source", where=input.path) from error


def _made(path: str, options: Mapping[str, str], where: str) -> OwnSource:
    kind: Any = load_class(path, OwnSource, where=where)
    for name in options:
        if name not in fields_of(kind):
            raise UsageError(
                f"--{name} has no meaning here", where=where, why=f"{path} has no field {name}"
            )
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise UsageError(f"{path} has no method {missing}", where=where)
    values = Values(dict(options), file=where)
    source: OwnSource = parse(kind, values)
    return source
