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
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pyarrow as pa

from olm_data.config.convert import fields_of, parse
from olm_data.config.import_path import is_import_path, load_class
from olm_data.config.values import Values
from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.errors import InputError, OlmError, UsageError, printable, said_by
from olm_data.plugins import path_of
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.columns import kinds_of, table_batches, table_schema
from olm_data.sources.hub import UNKNOWN_BYTES

GROUP = "olm_data.sources"
"""Entry points of packages that have sources."""

ROWS = 256
"""Rows taken at a time; batches are cut by bytes afterwards."""

OPTIONS = ("subset", "root", "split")
"""Options of a command that are fields of the class, where it has them."""

_SCHEME = "own:"

Row = str | Mapping[str, Any]
"""A text, or a record with its text in a column."""


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
    with _running(path, "parts"):
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
    with _running(path, part):
        return _made(path, options, input.path).revision(part)


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """A part is one unit."""
    return [Unit(input=index, start=0, stop=1, bytes=input.bytes or UNKNOWN_BYTES)]


def read(scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of a part.

    Raises:
        InputError: there is no such text column, or the source fails.
    """
    row = 0
    for table in _tables(scan.input, scan.options.text_column):
        if scan.is_past(row):
            return
        table_schema(table.schema, scan.input, scan.options)
        positions = np.arange(row, row + len(table), dtype=np.int64)
        row += len(table)
        yield from table_batches(scan, table, positions)


def columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Return the columns of a part's first rows. Raises as `table_schema`."""
    first = next(_tables(input, options.text_column), None)
    if first is None:
        return {options.text_column: {"string"}}
    return kinds_of(table_schema(first.schema, input, options))


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


def _tables(input: InputFile, text: str) -> Iterator[pa.RecordBatch]:
    path, part, options = _place(input)
    source = _made(path, options, input.path)
    with _running(path, part):
        rows = iter(source.rows(part))
    while True:
        with _running(path, part):
            some = list(islice(rows, ROWS))
        if not some:
            return
        yield _table([_record(row, text, input) for row in some], text, input)


def _record(row: Any, text: str, input: InputFile) -> dict[str, Any]:
    if isinstance(row, str):
        return {text: row}
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise InputError(
            f"a row is of type {type(row).__name__}, neither a text nor a record",
            where=input.path,
            fix="let rows yield strings, or mappings with string keys",
        )
    return dict(row)


def _table(rows: list[dict[str, Any]], text: str, input: InputFile) -> pa.RecordBatch:
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [row.get(name) for row in rows] for name in names}
    texts = found.get(text)
    if texts is not None and all(isinstance(value, str | None) for value in texts):
        # a lone surrogate is then no UTF-8, and counted as such
        data = [None if t is None else t.encode(errors="surrogatepass") for t in texts]
        found[text] = pa.array(data, pa.large_binary())
    try:
        return pa.RecordBatch.from_pydict(found)
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        raise InputError(
            "the values of a column are of several types", where=input.path, why=said_by(error)
        ) from error


def _place(input: InputFile) -> tuple[str, str, dict[str, str]]:
    """Return the class, the part and the options that an input names."""
    found = dict(parse_qsl(input.url.removeprefix(_SCHEME), keep_blank_values=True))
    try:
        return found.pop("class"), found.pop("part"), found
    except KeyError as error:
        raise InputError("it names no part of a source", where=input.path) from error


def _made(path: str, options: Mapping[str, str], where: str) -> OwnSource:
    kind: Any = load_class(path, OwnSource, where=where)
    known = [field.name for field in fields_of(kind)]
    for name in options:
        if name not in known:
            raise UsageError(
                f"--{name} has no meaning here",
                where=where,
                why=f"{path} has no field {name}",
            )
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise UsageError(f"{path} has no method {missing}", where=where)
    values = Values(dict(options), file=where)
    source: OwnSource = parse(kind, values)
    return source


class _running:
    """Turns what goes wrong in code of somebody's own into an error that names it."""

    def __init__(self, path: str, part: str) -> None:
        self._path, self._part = path, part

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, OlmError):
            raise InputError(
                f"the source {self._path} fails: {type(error).__name__}: {said_by(error)}",
                where=self._part,
            ) from error
