"""Arrow IPC: stream files (what `datasets` saves), IPC files and Feather v2, by record batches.

A local file is mapped, so that its batches are found without reading them; a remote one is one
unit. A stream must end with Arrow's end marker: without it a file cut between two batches would
look whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import IO, Any

import numpy as np
import pyarrow as pa

from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.errors import InputError
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.columns import (
    kinds_of,
    stored_name,
    table_batches,
    table_schema,
    used_columns,
)
from olm_data.sources.files import open_binary, reading
from olm_data.sources.formats import whole_file
from olm_data.sources.limits import Expansion

_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """Cut a local file into ranges of record batches of about `target_bytes`.

    Raises:
        InputError: it is no Arrow file, is truncated, or has no such text column.
    """
    if "://" in input.url:
        return whole_file(index, input)
    with _open(input) as (found, batches), reading(input):
        table_schema(found, input, options)
        firsts = accumulate((len(batch) for batch in batches), initial=0)
        count = sum(1 for first in firsts if input.until is None or first <= input.until)
        count -= input.until is None  # the last sum is the number of rows, no batch's first
    parts = max(1, min(count, round(input.bytes / max(target_bytes, 1))))
    cuts = [count * k // parts for k in range(parts + 1)]
    return [
        Unit(input=index, start=a, stop=b, bytes=max(input.bytes * (b - a) // max(count, 1), 1))
        for a, b in pairwise(cuts)
        if b > a
    ]


def read(scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of the unit's record batches.

    Raises:
        InputError: the file is damaged or has no such text column.
    """
    input, whole = scan.input, "://" in scan.input.url
    row, unpacked, text = 0, Expansion(input), Expansion(input)
    with _open(input) as (found, batches):
        table_schema(found, input, scan.options)
        number = 0
        while whole or number < scan.unit.stop:
            with reading(input):
                batch = next(batches, None)
            if batch is None or scan.is_past(row):
                break
            if whole or number >= scan.unit.start:
                positions = np.arange(row, row + len(batch), dtype=np.int64)
                with reading(input):
                    _validate(batch, scan.options)
                unpacked.add(batch.nbytes, input.bytes)
                for documents in table_batches(scan, batch, positions):
                    text.add(len(documents.data), input.bytes)
                    yield documents
            row += len(batch)
            number += 1


def _validate(batch: pa.RecordBatch, options: ReadOptions) -> None:
    """Check all offsets of the columns that are read: they come from outside, and lead anywhere.

    The text is checked as bytes: that it is UTF-8 is counted later, document by document.

    Raises:
        pa.ArrowInvalid: an offset leads out of its buffer.
    """
    batch.validate(full=False)
    names = {stored_name(batch.schema, name) for name in used_columns(options)}
    for name in names - {None}:
        column = batch.column(name)
        if isinstance(column, pa.DictionaryArray):
            values = _as_bytes(column.dictionary)
            values.validate(full=True)
            column = pa.DictionaryArray.from_arrays(column.indices, values, safe=False)
        _as_bytes(column).validate(full=True)


def _as_bytes(column: pa.Array) -> pa.Array:
    kind = _BYTES.get(column.type)
    return column if kind is None else column.view(kind)


def columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Return the columns of a file. Raises as `table_schema`."""
    with _open(input) as (found, _):
        return kinds_of(table_schema(found, input, options))


@contextmanager
def _open(input: InputFile) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with open_binary(input) as raw:
        with reading(input, raw):
            is_file = raw.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            if not is_file:
                _require_end(raw, input)
            raw.seek(0)
            source: Any = raw if "://" in input.url else pa.memory_map(input.url)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            _ = reader.schema.names  # they are decoded only now, and may be anything
        if is_file:
            yield reader.schema, (reader.get_batch(k) for k in range(reader.num_record_batches))
        else:
            yield reader.schema, iter(reader)


def _require_end(raw: IO[bytes], input: InputFile) -> None:
    raw.seek(max(input.bytes - 8, 0))
    if raw.read(8) != _END_OF_STREAM:
        raise InputError(
            "the Arrow stream has no end: it is truncated, or this is not an Arrow file",
            where=f"{input.path}, byte {input.bytes}",
            fix="copy or write it again",
        )
