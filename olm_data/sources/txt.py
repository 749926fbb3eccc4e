"""Plain text: a file is one document, or is split at blank lines or at a separator.

    whole file                      -> one document, its id is the file's path
    --separator blank-lines | STR   -> documents between separators, read in bounded memory

A byte order mark at the start of the file is left out. Line ends are kept as they are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import strings
from olm_data.dataset.inputs import InputFile, KeepType, ReadOptions, Unit, keep_type
from olm_data.decompress import ByteStream
from olm_data.errors import printable
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.buffers import from_buffers, joined
from olm_data.sources.columns import kept_columns
from olm_data.sources.files import open_stream
from olm_data.sources.formats import whole_file
from olm_data.sources.limits import check_record

BLANK_LINES = "blank-lines"
_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
_FEW, _MANY_LINES = 8, 1_000  # files that are looked into; lines that are rarely one text
# A line break and one or more lines of nothing but white space.
_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t\r\f\v]*\n)+")
_SPACE = re.compile(rb"[ \t\r\f\v\n]*")


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """A text file is one unit."""
    return whole_file(index, input)


def notes(inputs: Sequence[InputFile], separator: str | None) -> list[str]:
    """Return what the user should know of how a few text files become documents."""
    found = []
    few = [each for each in inputs if each.format == "txt"]
    for input in few if len(few) <= _FEW else []:
        with open_stream(input) as stream:
            head = stream.read(_CHUNK)
        name, lines = printable(input.path), head.count(b"\n")
        if separator is None and lines >= _MANY_LINES:
            found.append(
                f"{name} is one document, and has {lines:,} lines or more; where each is one, say "
                "--separator $'\\n', and where blank lines part them, --separator blank-lines"
            )
        elif separator is not None and head and not _pattern(separator).search(head):
            found.append(
                f"{name}: the separator does not stand in its first {len(head):,} bytes, which "
                "are of one document"
            )
    return found


def columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Text has no columns."""
    return {}


def read(scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of a text file.

    Raises:
        InputError: the file is damaged.
    """
    input, separator = scan.input, scan.options.separator
    with open_stream(input) as stream:
        if separator is None:
            pieces: Iterator[tuple[list[bytes], list[int]]] = iter([_whole(stream, input)])
        else:
            pieces = _split(stream, input, separator)
        for texts, starts in pieces:
            if input.until is not None:
                count = bisect_right(starts, input.until)
                texts, starts = texts[:count], starts[:count]
                if not texts:
                    break
            data, offsets = joined(texts)
            yield from from_buffers(
                scan,
                data,
                offsets,
                positions=np.array(starts, dtype=np.int64),
                ids=strings([input.path.removeprefix("pylib:")]) if separator is None else None,
                keep=kept_columns(scan.options, partial(_nulls, len(texts))),
                rows_in=len(texts),
            )


def _pattern(separator: str) -> re.Pattern[bytes]:
    return _BLANK_LINES if separator == BLANK_LINES else re.compile(re.escape(separator.encode()))


def _nulls(rows: int, name: str, kind: KeepType) -> pa.Array:
    return pa.nulls(rows, keep_type(kind))


def _whole(stream: ByteStream, input: InputFile) -> tuple[list[bytes], list[int]]:
    chunks, size = [], 0
    while chunk := stream.read(_CHUNK):
        chunks.append(chunk)
        size += len(chunk)
        check_record(size, input, 0)
    text = b"".join(chunks)
    return ([text[3:]], [3]) if text.startswith(_BOM) else ([text], [0])


def _split(
    stream: ByteStream, input: InputFile, separator: str
) -> Iterator[tuple[list[bytes], list[int]]]:
    """Yield runs of documents and their byte offsets; what is between two separators is a document.

    A file that ends with a separator has no document after it, and blank lines at the start of a
    file are no document before them.
    """
    blank_lines = separator == BLANK_LINES
    pattern = _pattern(separator)
    pending, place, at_start = b"", 0, True
    while chunk := stream.read(max(_CHUNK, len(pending))):
        check_record(len(pending), input, place)
        buffer = pending + chunk
        if place == 0 and buffer.startswith(_BOM):
            buffer, place = buffer[3:], 3
        if at_start and blank_lines:
            kept = re.sub(rb"\A(?:[ \t\r\f\v]*\n)+", b"", buffer)
            place += len(buffer) - len(kept)
            buffer = kept
        at_start = at_start and not buffer.strip()
        texts, starts, begin = [], [], 0
        for match in pattern.finditer(buffer):
            rest = _SPACE.match(buffer, match.end()) if blank_lines else None
            if (rest.end() if rest else match.end()) == len(buffer):
                break  # the separator may go on in the next chunk
            texts.append(buffer[begin : match.start()])
            starts.append(place + begin)
            begin = match.end()
        if texts:
            yield texts, starts
        pending, place = buffer[begin:], place + begin
    last = pattern.search(pending)  # one that ends the file
    if last:
        pending = pending[: last.start()]
    elif blank_lines:
        pending = pending.removesuffix(b"\n").removesuffix(b"\r")
    if pending:
        yield [pending], [place]
