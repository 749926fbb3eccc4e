"""JSON Lines: one object a line, plain or compressed.

    bytes -> blocks of whole lines (line_blocks) -> records (json_records) -> buffers

A unit of a plain file is a byte range; a compressed file is one unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.formats import codec_of, whole_file
from olm_data.sources.json_records import Records, field_kinds, require_text
from olm_data.sources.line_blocks import plain_blocks, stream_blocks

HEAD_BYTES = 1 << 20


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """Cut a plain file into byte ranges of about `target_bytes`; a compressed one is one unit."""
    if codec_of(input.url):
        return whole_file(index, input)
    size = input.bytes if input.until is None else input.until + 1
    count = max(1, round(size / max(target_bytes, 1)))
    cuts = [size * k // count for k in range(count + 1)]
    return [Unit(input=index, start=a, stop=b, bytes=b - a) for a, b in pairwise(cuts) if b > a]


def read(scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents whose lines begin in the unit.

    Raises:
        InputError: the file is damaged, or has no such text field.
    """
    input, unit = scan.input, scan.unit
    records = Records(scan)
    documents = rows = 0
    for block, place in _blocks(input, unit.start, unit.stop):
        if scan.is_past(place):
            break
        held = [block]
        del block  # it may be one very long line: kept here, it would be in memory once more
        batches = deque(records.decode(held.pop(), place))
        documents += sum(batch.documents for batch in batches)
        rows += sum(batch.rows_in for batch in batches)
        while batches:
            yield batches.popleft()
    if rows and not documents:
        require_text(_head(input), input, scan.options)


def columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Return the fields of the first lines. Raises as `json_records.field_kinds`."""
    return field_kinds(_head(input), input, options)


def _blocks(input: InputFile, start: int, stop: int) -> Iterator[tuple[bytes, int]]:
    """Yield the blocks of lines that begin in a range of bytes; a compressed file is all one."""
    return stream_blocks(input) if codec_of(input.url) else plain_blocks(input, start, stop)


def _head(input: InputFile) -> list[bytes]:
    """Return the non-blank lines of the first MiB, at least one, however long."""
    for block, _ in _blocks(input, 0, min(input.bytes, HEAD_BYTES)):
        lines = [line for line in block.split(b"\n") if line.strip()]
        if lines:
            return lines
    return []
