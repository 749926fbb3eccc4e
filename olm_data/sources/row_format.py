"""Formats of files that are read row by row, by somebody's own code.

file --open_stream--> binary file --rows--> texts or records --> documents
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import BinaryIO, ClassVar

import pyarrow as pa

from olm_data.config.import_path import import_path
from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.decompress import buffered
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.files import open_stream
from olm_data.sources.formats import whole_file
from olm_data.sources.rows import NoRow, Row, columns_of, documents_of, tables_of


class InputFormat(ABC):
    """A format of files that is read from the start, and may need to know which file it is.

    Attributes:
        packages: distributions, of our extras, whose versions decide what the text is.
    """

    packages: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def records(
        self, file: BinaryIO, input: InputFile, options: ReadOptions
    ) -> Iterable[Row | NoRow]:
        """Yield the records of a file, see `RowFormat.rows`; what is no document is a `NoRow`."""

    def columns(self, input: InputFile, options: ReadOptions) -> ColumnKinds:
        """Return the columns of the first rows. Raises as `table_schema`."""
        return columns_of(self._tables(input, options), input, options)

    def units(
        self, index: int, input: InputFile, options: ReadOptions, target_bytes: int
    ) -> list[Unit]:
        """A file is one unit; an empty one is none."""
        return whole_file(index, input) if input.bytes else []

    def read(self, scan: Scan) -> Iterator[DocumentBatch]:
        """Yield the documents of a file.

        Raises:
            InputError: there is no such text column, or the code fails.
        """
        yield from documents_of(self._tables(scan.input, scan.options), scan)

    def _tables(self, input: InputFile, options: ReadOptions) -> Iterator[pa.RecordBatch | NoRow]:
        what = f"the format {import_path(type(self))}"
        with open_stream(input) as file:
            records = partial(self.records, buffered(file), input, options)
            yield from tables_of(records, what, input, options.text_column)


class RowFormat(InputFormat):
    """A format of files that is read row by row, from the start: a `Reader`.

    A package brings it by an entry point of `olm_data.formats`: its name is the ending of the
    files' names, its value a `RowFormat` that was made.
    """

    @abstractmethod
    def rows(self, file: BinaryIO) -> Iterable[Row]:
        """Yield the rows of a file: the same ones in the same order each time, in any process.

        Args:
            file: from its start on, never back; decompressed, where its name ends in .gz or so.
        """

    def records(self, file: BinaryIO, input: InputFile, options: ReadOptions) -> Iterable[Row]:
        """Yield the rows."""
        return self.rows(file)
