"""The reader of each format, and what all of them share around it.

    plan_units -> [Unit]
    read_units -> reader of the input's format -> --exclude-ids -> --sample -> --filter
               -> small batches joined

A format is one module with the functions of `Reader`, or a `RowFormat`: an entry point of
`olm_data.formats`. `where` is for the readers themselves, which apply it before they read the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from importlib.metadata import version
from typing import Any, Protocol

from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.errors import InputError, printable
from olm_data.extras import DISTRIBUTION, needs
from olm_data.plugins import Registry
from olm_data.select.selection import IdSet, content_hashes, document_digests, drawn
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.buffers import choose, merge
from olm_data.sources.formats import GROUP
from olm_data.sources.own_filter import passed


class Reader(Protocol):
    """How one format is read; a module, or an object."""

    def columns(self, input: InputFile, options: ReadOptions) -> ColumnKinds:
        """Look at the start of an input; refuse it where it has no text."""
        ...

    def units(
        self, index: int, input: InputFile, options: ReadOptions, target_bytes: int
    ) -> list[Unit]:
        """See `plan_units`."""
        ...

    def read(self, scan: Scan) -> Iterator[DocumentBatch]:
        """Yield the documents of one unit that meet the condition."""
        ...


CHAT = "chat"
"""Format of rows of messages, in files of several formats."""

_READERS: Mapping[str, Reader] = Registry(GROUP, "jsonl")


def reader_of(input: InputFile, options: ReadOptions) -> Reader:
    """Return what reads an input.

    Raises:
        InputError: no installed package does.
    """
    reader: Reader = _reader(input.format if options.chat is None else CHAT, input.path)
    return reader


def chat_reader() -> Any:
    """Return what reads chats: a `Reader` that also has `options` and `encoder`.

    Raises:
        InputError: the extension is not installed.
    """
    return _reader(CHAT, "--format chat")


def _reader(name: str, where: str) -> Any:
    reader = _READERS.get(name)
    if reader is None:
        raise InputError(
            f"no installed package reads the format {printable(name)[:40]}",
            where=where,
            fix=f"install the one that brings it, by an entry point of {GROUP}; one of ours comes "
            f"with {DISTRIBUTION}: install that again",
        )
    return reader


def libraries_of(inputs: Iterable[InputFile]) -> tuple[str, ...]:
    """Return the libraries that make the text of inputs, with their versions.

    Raises:
        MissingExtra: one is not installed.
    """
    found = dict[str, str]()
    for format, input in {each.format: each for each in inputs}.items():
        for name in getattr(_reader(format, input.path), "packages", ()):
            with needs(f"the format {format}", where=input.path):
                found[name] = f"{name} {version(name)}"
    return tuple(sorted(found.values()))


def plan_units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """Cut one input into units of about `target_bytes` of text, by its layout alone.

    Args:
        index: index of the input in the plan's list.

    Returns:
        units in reading order that cover the input; none for an empty file.

    Raises:
        InputError: the file is damaged, or has no such text column (where the format can tell).
        StorageError: remote storage fails.
    """
    return reader_of(input, options).units(index, input, options, target_bytes)


def read_units(
    inputs: Sequence[InputFile],
    units: Sequence[Unit],
    options: ReadOptions,
    excluded: IdSet | None = None,
) -> Iterator[DocumentBatch]:
    """Yield the chosen documents of units, in their order; batches of small files are joined.

    Each record of the input is in exactly one batch: as a document, in `dropped`, or counted in
    `skipped`.

    Args:
        excluded: ids to leave out, the set whose digest is `options.exclude`.

    Raises:
        InputError: a file is damaged, or has no such text column.
        StorageError: remote storage fails.
    """
    assert (excluded is None) == (options.exclude is None)

    def select(batch: DocumentBatch) -> DocumentBatch:
        if excluded is not None and batch.documents and batch.ids is not None:
            batch = choose(batch, ~excluded.find(batch.ids), "excluded")
        if options.sample is not None and batch.documents:
            hashes = content_hashes(document_digests(batch.data, batch.offsets))
            taken = drawn(hashes, Fraction(options.sample), options.seed or 0)
            batch = choose(batch, taken, "unsampled")
        if options.filter is not None and batch.documents:
            batch = passed(batch, inputs, options)
        return batch

    def each() -> Iterator[DocumentBatch]:
        for unit in units:
            input = inputs[unit.input]
            # map, as the variable of a loop would keep a batch while the consumer works on it
            yield from map(select, reader_of(input, options).read(Scan(input, unit, options)))

    return merge(each(), options.batch_bytes)
