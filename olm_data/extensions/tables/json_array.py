"""JSON arrays: a `.json` file that holds `[{...}, {...}]`, read as a stream of records.

    bytes -> elements, by their brackets and quotes alone -> decoded one by one -> buffers

A file is one unit and its elements are counted. Each element is decoded as a line of JSON Lines is,
so one that is no record is a drop with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.decompress import ByteStream
from olm_data.errors import InputError
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.files import open_stream, reading
from olm_data.sources.formats import whole_file
from olm_data.sources.json_records import Records, field_kinds, require_text
from olm_data.sources.limits import check_record

_CHUNK = 1 << 20
_HEAD_RECORDS = 1000
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
# a whole string, a bracket, a comma, or a string that is not whole yet
_PARTS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{},]|"', re.DOTALL)


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """An array is one unit."""
    return whole_file(index, input)


def read(scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of an array.

    Raises:
        InputError: the array is damaged, or no record has such a text field.
    """
    records = Records(scan)
    documents = number = size = 0
    held: list[bytes] = []
    for element in elements(scan.input):
        if scan.is_past(number + len(held)):
            break
        held.append(element)
        size += len(element)
        del element
        if size >= scan.options.batch_bytes:
            for batch in _decoded(records, held, number):
                documents += batch.documents
                yield batch
            number, held, size = number + len(held), [], 0
    for batch in _decoded(records, held, number):
        documents += batch.documents
        yield batch
    if number + len(held) and not documents:
        require_text(_head(scan.input), scan.input, scan.options)


def columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Return the fields of the first records. Raises as `json_records.field_kinds`."""
    return field_kinds(_head(input), input, options)


def _head(input: InputFile) -> list[bytes]:
    head: list[bytes] = []
    size = 0
    for element in elements(input):
        head.append(element)
        size += len(element)
        if size > _CHUNK or len(head) == _HEAD_RECORDS:
            break
    return head


def _decoded(records: Records, held: list[bytes], number: int) -> Iterator[DocumentBatch]:
    if held:
        positions = np.arange(number, number + len(held), dtype=np.int64)
        yield from records.decode_each(held, positions)


def elements(input: InputFile) -> Iterator[bytes]:
    """Yield the bytes of each element of the array, white space around it left out.

    Raises:
        InputError: brackets or commas that make no array, text after its end, or no end.
    """
    with open_stream(input) as stream, reading(input):
        yield from _Splitter(input).split(stream)


class _Splitter:
    """Finds the elements of one array."""

    def __init__(self, input: InputFile) -> None:
        self._input = input
        self._buffer = b""
        self._place = 0  # byte of the file at which the buffer begins
        self._at = 0  # where in the buffer the search goes on
        self._begin: int | None = None  # where the element at hand begins, once inside the array
        self._depth = 0
        self._first = True  # no element was seen
        self._ended = False

    def split(self, stream: ByteStream) -> Iterator[bytes]:
        """Yield the elements of a stream."""
        while chunk := stream.read(max(_CHUNK, len(self._buffer))):
            start = not self._place and not self._buffer
            self._buffer += chunk.removeprefix(_BOM) if start else chunk
            yield from self._found()
            self._drop_searched()
        if not self._ended:
            raise InputError(
                "the JSON array has no end: the file is truncated",
                where=f"{self._input.path}, byte {self._place + len(self._buffer)}",
                fix="copy or download it again",
            )

    def _found(self) -> Iterator[bytes]:
        """Yield the elements that end in the buffer."""
        if self._ended:
            self._refuse_rest(self._buffer)
            return
        for match in _PARTS.finditer(self._buffer, self._at):
            part = match[0]
            if part == b'"':  # goes on in the next chunk
                self._at = match.start()
                return
            if part in b"[{":
                if self._depth == 0:
                    if part != b"[" or self._buffer[: match.start()].strip(_SPACE):
                        raise self._no_array(match.start())
                    self._begin = match.end()
                self._depth += 1
            elif part in b"]}":
                self._depth -= 1
                if self._depth == 0:
                    if part != b"]":
                        raise self._no_array(match.start())
                    yield from self._element(match.start(), last=True)
                    self._ended = True
                    self._refuse_rest(self._buffer[match.end() :])
                    return
            elif part == b"," and self._depth == 1:
                yield from self._element(match.start(), last=False)
                self._begin = match.end()
        # what follows the last part may hold none of them: it is not searched again
        self._at = len(self._buffer)

    def _drop_searched(self) -> None:
        """Keep of the buffer the element at hand."""
        if self._ended:
            self._buffer = b""
            return
        cut = self._begin or 0
        check_record(len(self._buffer) - cut, self._input, self._place + cut)
        self._buffer, self._at = self._buffer[cut:], self._at - cut
        self._place += cut
        if self._depth == 0 and self._buffer.strip(_SPACE):
            raise self._no_array(0)
        self._begin = None if self._begin is None else 0

    def _element(self, end: int, *, last: bool) -> Iterator[bytes]:
        assert self._begin is not None
        raw = self._buffer[self._begin : end].strip(_SPACE)
        if raw:
            yield raw
        elif not (last and self._first):  # [] is an array; [1,] and [,] are none
            raise self._no_array(self._begin)
        self._first = False

    def _refuse_rest(self, rest: bytes) -> None:
        if rest.strip(_SPACE):
            raise InputError(
                "something follows the end of the JSON array",
                where=self._input.path,
                why="it would not be read",
                fix="name a file of one object a line .jsonl, and let a .json file hold one array",
            )

    def _no_array(self, at: int) -> InputError:
        return InputError(
            "the file is not a JSON array",
            where=f"{self._input.path}, near byte {self._place + at}",
            fix="a .json file holds one array of objects, or one object a line",
        )
