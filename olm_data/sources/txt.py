"""Plain text: a file is one document, or is split at blank lines or at a separator.

    whole file                      -> one document, its id is the file's path
    --separator blank-lines | STR   -> documents between separators, read in bounded memory

A byte order mark at the start of the file is left out. Line ends are kept as they are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import strings
from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.sources.base import DocumentBatch
from olm_data.sources.buffers import from_buffers
from olm_data.sources.files import open_stream
from olm_data.sources.formats import codec_of
from olm_data.sources.jsonl import TEXT_PER_COMPRESSED_BYTE
from olm_data.sources.limits import check_record
from olm_data.sources.values import batch_of

BLANK_LINES = "blank-lines"
_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
# A line break and one or more lines of nothing but white space.
_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t\r\f\v]*\n)+")
_SPACE = re.compile(rb"[ \t\r\f\v\n]*")


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """A text file is one unit."""
    size = input.bytes * (TEXT_PER_COMPRESSED_BYTE if codec_of(input.url) else 1)
    return [Unit(input=index, start=0, stop=1, bytes=max(size, 1))]


def read(input: InputFile, unit: Unit, options: ReadOptions) -> Iterator[DocumentBatch]:
    """Yield the documents of a text file.

    Raises:
        InputError: the file is damaged.
    """
    with open_stream(input) as stream:
        if options.separator is None:
            pieces: Iterator[tuple[list[bytes], list[int]]] = iter([_whole(stream, input)])
        else:
            pieces = _split(stream, input, options.separator)
        for texts, starts in pieces:
            if input.until is not None:
                wanted = bisect_right(starts, input.until)
                texts, starts = texts[:wanted], starts[:wanted]
                if not texts:
                    break
            sizes = np.array([len(text) for text in texts], dtype=np.int64)
            offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            ids = keep = None
            if options.separator is None:
                ids = strings([input.path.removeprefix("pylib:")])
            if options.keep:
                kept = [pa.nulls(len(texts), field.type) for field in options.keep_schema or []]
                keep = batch_of(input, options, kept)
            yield from from_buffers(
                np.frombuffer(b"".join(texts), dtype=np.uint8),
                offsets,
                input_index=unit.input,
                positions=np.array(starts, dtype=np.int64),
                ids=ids,
                keep=keep,
                dropped=(),
                rows_in=len(texts),
                batch_bytes=options.batch_bytes,
                on_invalid=options.on_invalid,
            )


def _whole(stream: Any, input: InputFile) -> tuple[list[bytes], list[int]]:
    chunks, size = [], 0
    while chunk := stream.read(_CHUNK):
        chunks.append(chunk)
        size += len(chunk)
        check_record(size, input, 0)
    text = b"".join(chunks)
    return ([text[3:]], [3]) if text.startswith(_BOM) else ([text], [0])


def _split(
    stream: Any, input: InputFile, separator: str
) -> Iterator[tuple[list[bytes], list[int]]]:
    """Yield runs of documents and their byte offsets; what is between two separators is a document.

    A file that ends with a separator has no document after it, and blank lines at the start of a
    file are no document before them.
    """
    blank_lines = separator == BLANK_LINES
    pattern = _BLANK_LINES if blank_lines else re.compile(re.escape(separator.encode()))
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
