"""JSON Lines: one object a line, plain or compressed, decoded for the wanted fields only.

    bytes -> blocks of whole lines -> msgspec, typed, all lines of a block at once -> buffers
                                      a block with an odd line -> line by line, each explained

A unit of a plain file is a byte range; the lines that begin in it are its lines, so ranges need not
know where lines begin. A compressed file is one unit. A line that cannot be a document is a drop
with a reason, never an error; a file in which no line at the start has the text field is an error.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.errors import InputError, printable, suggest
from olm_data.select.evaluate import matches
from olm_data.select.where import columns, kind_of_value
from olm_data.sources.base import DocumentBatch, Drop
from olm_data.sources.buffers import from_buffers
from olm_data.sources.files import open_binary, open_stream, reading
from olm_data.sources.formats import codec_of
from olm_data.sources.limits import check_record
from olm_data.sources.nested import MISSING, MOST_FIELDS, flattened, value_below, value_of
from olm_data.sources.values import batch_of, kind_of_json, plain_values

TEXT_PER_COMPRESSED_BYTE = 3  # for planning only
HEAD_BYTES = 1 << 20
CHUNK = 4 << 20
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")
_FILTERED = ("filtered", "")


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """Cut a plain file into byte ranges of about `target_bytes`; a compressed one is one unit."""
    if codec_of(input.url):
        size = max(input.bytes * TEXT_PER_COMPRESSED_BYTE, 1)
        return [Unit(input=index, start=0, stop=1, bytes=size)]
    size = input.bytes if input.until is None else input.until + 1
    count = max(1, round(size / max(target_bytes, 1)))
    cuts = [size * k // count for k in range(count + 1)]
    return [Unit(input=index, start=a, stop=b, bytes=b - a) for a, b in pairwise(cuts) if b > a]


def read(input: InputFile, unit: Unit, options: ReadOptions) -> Iterator[DocumentBatch]:
    """Yield the documents whose lines begin in the unit.

    Raises:
        InputError: the file is damaged, or has no such text field.
    """
    records = Records(input, unit.input, options)
    documents = rows = 0
    blocks = _compressed_blocks(input) if codec_of(input.url) else _plain_blocks(input, unit)
    for block, place in blocks:
        if input.until is not None and place > input.until:
            break
        held = [block]
        del block  # it may be one very long line: kept here, it would be in memory once more
        batches = deque(records.decode(held.pop(), place))
        documents += sum(batch.documents for batch in batches)
        rows += sum(batch.rows_in for batch in batches)
        while batches:
            yield batches.popleft()
    if rows and not documents:
        check(input, options)


def check(input: InputFile, options: ReadOptions) -> dict[str, FieldSeen]:
    """Refuse a file whose start has lines, but none with the text field.

    Returns:
        the fields of the objects at the start of the file, in order of appearance.

    Raises:
        InputError: names the fields there are.
    """
    return check_records(_head(input), input, options)


@dataclass
class FieldSeen:
    """A field at the start of a file: kinds of its values, for conditions and to keep them."""

    kinds: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)

    def add(self, value: Any) -> None:
        """Note a value; null is of any kind."""
        if value is not None:
            self.kinds.add(str(kind_of_value(value)))
            self.kept.add(str(kind_of_json(value)))


def check_records(
    records: Sequence[bytes], input: InputFile, options: ReadOptions
) -> dict[str, FieldSeen]:
    """Return the fields of some records, as `check` does of those at the start of a file.

    Raises:
        InputError: names the fields there are.
    """
    seen: dict[str, FieldSeen] = {}
    for record in records:
        value = _loads(record)
        if isinstance(value, dict):
            for name, one in flattened(value):
                if name in seen or len(seen) < MOST_FIELDS:
                    seen.setdefault(name, FieldSeen()).add(one)
            if value_of(value, options.text_column) is not MISSING:
                seen.setdefault(options.text_column, FieldSeen())
    if options.text_column in seen or not records:
        return seen
    if not seen:
        raise InputError(
            "no line at the start of the file is a JSON object",
            where=input.path,
            fix="JSON Lines holds one object a line; name an array of objects .json, a text .txt",
        )
    known = [printable(name) for name in list(seen)[:20]]
    raise InputError(
        f"the text field {options.text_column!r} is in no record at the start of the file",
        where=input.path,
        why=f"its fields are: {', '.join(known)}",
        fix=f"say --text-column FIELD ({suggest(options.text_column, known)})",
    )


class Records:
    """Decodes blocks of lines, or single records, of one input into batches."""

    def __init__(self, input: InputFile, index: int, options: ReadOptions) -> None:
        self._input, self._index, self._options = input, index, options
        names = [options.text_column]
        names += [] if options.id_column is None else [options.id_column]
        names += [name for name, _ in options.keep]
        self._condition = options.condition
        self._tested = [] if self._condition is None else columns(self._condition)
        names += self._tested
        self._nested = {name: name.split(".") for name in names if "." in name}
        tops = [path[0] for path in self._nested.values()]
        # Field names are any strings; attribute names are not, hence the numbers.
        self._attribute = {name: f"f{n}" for n, name in enumerate(dict.fromkeys([*names, *tops]))}
        text: Any = str | None | msgspec.UnsetType
        typed = {options.text_column} - {*self._nested, *tops}
        fields: list[Any] = [
            (attribute, text if name in typed else Any, MISSING)
            for name, attribute in self._attribute.items()
        ]
        rename = {attribute: name for name, attribute in self._attribute.items()}
        self._type = msgspec.defstruct("Record", fields, rename=rename, gc=False)
        self._decoder = msgspec.json.Decoder(self._type)
        self._replaced = 0  # texts mended in the block at hand

    def decode(self, block: bytes, place: int) -> Iterator[DocumentBatch]:
        """Yield the documents of a block of whole lines.

        Args:
            place: byte offset of the block in the file, or number of its first line.
        """
        view = np.frombuffer(block, dtype=np.uint8)
        starts, stops = _lines(view)
        by_line = self._input.position == "line"
        if by_line and self._input.until is not None:
            wanted = self._input.until + 1 - place
            starts, stops = starts[:wanted], stops[:wanted]
        number = np.arange(len(starts), dtype=np.int64)
        records = self._all(block, view, starts, stops)
        if records is None:
            # Blank lines, or something odd: without blank lines it may still go in one piece.
            full = np.array(
                [
                    bool(block[a:b].strip())
                    for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
                ],
                dtype=bool,
            )
            if not full.all():
                starts, stops, number = starts[full], stops[full], number[full]
                records = self._all(block, view, starts, stops)
        positions = place + (number if by_line else starts)
        drops: list[Drop] = []
        filtered = self._replaced = 0
        if records is None:
            spans = zip(starts.tolist(), stops.tolist(), strict=True)
            lines = (block[a:b] for a, b in spans)
            records, drops, filtered = self._one_by_one(lines, positions)
            del lines
        del block, view
        yield from self._batches(records, positions, drops, filtered)

    def decode_each(
        self, records: Iterable[bytes], positions: np.ndarray
    ) -> Iterator[DocumentBatch]:
        """Yield the documents of records that are no lines.

        Args:
            positions: int64[records].
        """
        self._replaced = 0
        found, drops, filtered = self._one_by_one(records, positions)
        yield from self._batches(found, positions, drops, filtered)

    def _one_by_one(
        self, records: Iterable[bytes], positions: np.ndarray
    ) -> tuple[list[Any], list[Drop], int]:
        """Decode records one by one: (record or None each, drops with reasons, filtered)."""
        drops: list[Drop] = []
        found: list[Any] = []
        filtered = 0
        for raw, position in zip(records, positions.tolist(), strict=True):
            record = self._one(raw)
            if record is _FILTERED:
                filtered, record = filtered + 1, None
            elif isinstance(record, tuple):
                drops.append(Drop.of(record[0], self._index, position, record[1], raw))
                record = None
            found.append(record)
        return found, drops, filtered

    def _all(
        self, block: bytes, view: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> list[Any] | None:
        """Decode all lines at once, or return None unless each line is exactly one good object.

        The library does not care where lines end. If each line begins with `{` and ends with `}`,
        no object can go on from one line to the next, so equal numbers mean one object a line.
        """
        if not len(starts):
            return []
        if not (stops - starts > 2).all() or not (view[starts] == 0x7B).all():
            return None
        last = np.where(view[stops - 1] == 0x0D, view[stops - 2], view[stops - 1])
        if not (last == 0x7D).all():
            return None
        try:
            records = self._decoder.decode_lines(block)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if len(records) != len(starts) or not all(type(t) is str for t in self._texts(records)):
            return None
        return list(records)

    def _one(self, line: bytes) -> Any:
        """Decode one line: a record, `_FILTERED`, or (reason, detail) of its drop."""
        try:
            record = self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._careful(line)
        text = next(self._texts([record]))
        if isinstance(text, str):
            return record
        if not self._matching([record])[0]:
            return _FILTERED
        return "no_text", _no_text(self._options.text_column, text)

    def _careful(self, line: bytes) -> Any:
        """Decode a line the typed decoder refuses: bad text is told from bad metadata beside it."""
        value = _loads(line)
        if isinstance(value, str):
            return "malformed", value
        if not isinstance(value, dict):
            return "malformed", f"a JSON {type(value).__name__}, not an object"
        name = self._options.text_column
        text = value_of(value, name)
        fields = {a: _encodable(value[n]) for n, a in self._attribute.items() if n in value}
        record = self._type(**fields)
        if not self._matching([record])[0]:
            return _FILTERED
        if not isinstance(text, str):
            return "no_text", _no_text(name, text)
        try:
            text.encode()
            setattr(record, self._attribute[name], text)
        except UnicodeEncodeError as error:
            if self._options.on_invalid != "replace":
                return "invalid_utf8", f"character {error.start} of the text: {error.reason}"
            self._replaced += 1
            mended = value_of(json.loads(line.decode(errors="replace")), name)
            setattr(record, self._attribute[name], _SURROGATE.sub("\ufffd", mended))
        return record

    def _matching(self, records: list[Any]) -> np.ndarray:
        """Return bool[records]: which meet the condition."""
        if self._condition is None:
            return np.ones(len(records), bool)
        values = {name: self._values(records, name) for name in self._tested}
        return matches(self._condition, values, len(records))

    def _values(self, records: list[Any], name: str) -> list[Any]:
        return [None if value is MISSING else value for value in self._each(records, name)]

    def _texts(self, records: Iterable[Any]) -> Iterator[Any]:
        return self._each(records, self._options.text_column)

    def _each(self, records: Iterable[Any], name: str) -> Iterator[Any]:
        """Return the values of a field, `MISSING` where a record lacks it."""
        own = attrgetter(self._attribute[name])
        if name not in self._nested:
            return map(own, records)
        first, *rest = self._nested[name]
        top = attrgetter(self._attribute[first])
        values = ((own(record), record) for record in records)
        return (
            value_below(top(record), rest) if value is MISSING else value
            for value, record in values
        )

    def _batches(
        self, records: list[Any], positions: np.ndarray, drops: list[Drop], filtered: int
    ) -> Iterator[DocumentBatch]:
        options = self._options
        good = [record for record in records if record is not None]
        if len(good) != len(records):
            positions = positions[[record is not None for record in records]]
        if self._condition is not None:
            chosen = self._matching(good)
            filtered += len(chosen) - int(chosen.sum())
            good, positions = list(compress(good, chosen)), positions[chosen]
        rows_in = len(records)
        texts = [text.encode() for text in self._texts(good)]
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=offsets[1:])
        yield from from_buffers(
            np.frombuffer(b"".join(texts), dtype=np.uint8),
            offsets,
            input_index=self._index,
            positions=positions,
            ids=self._column(good, options.id_column, "string") if options.id_column else None,
            keep=batch_of(
                self._input,
                options,
                [self._column(good, name, kind) for name, kind in options.keep],
            )
            if options.keep
            else None,
            dropped=drops,
            rows_in=rows_in,
            batch_bytes=options.batch_bytes,
            on_invalid=options.on_invalid,
            filtered=filtered,
            decoded=True,
            replaced=self._replaced,
        )

    def _column(self, records: list[Any], name: str, kind: str) -> pa.Array:
        return plain_values(self._values(records, name), kind, name, self._input.path)


def _plain_blocks(input: InputFile, unit: Unit) -> Iterator[tuple[bytes, int]]:
    """Yield (whole lines, byte offset of the first) of the lines that begin in [start, stop)."""
    with open_binary(input) as file, reading(input, file):
        start = unit.start
        if start:
            # The line that holds byte start - 1 belongs to the unit before, up to its line break.
            file.seek(start - 1)
            while chunk := file.read(_chunk(0)):
                cut = chunk.find(b"\n")
                if cut >= 0:
                    start = start - 1 + cut + 1
                    break
                start += len(chunk)
            else:
                return
        if start >= unit.stop:
            return
        file.seek(start)
        yield from _blocks(file, input, start, unit.stop)


def _blocks(file: Any, input: InputFile, start: int, stop: int) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of whole lines from `start` to the end of the line that holds byte stop - 1."""
    pending: list[bytes] = []
    place = at = start
    while at < stop:
        check_record(at - place, input, place)
        chunk = file.read(min(_chunk(at - place), stop - at))
        if not chunk:
            break
        if at == 0:
            chunk = _without_bom(chunk)
        at += len(chunk)
        cut = chunk.rfind(b"\n") + 1
        if cut:
            parts, pending = [*pending, memoryview(chunk)[:cut]], [chunk[cut:]]
            size = sum(map(len, parts))
            del chunk  # nothing is kept while the block is worked on: it may be a very long line
            yield _joined(parts), place
            place += size
        else:
            pending.append(chunk)
    # The last line goes on past `stop`, up to its line break or the end of the file.
    while any(pending):
        check_record(at - place, input, place)
        chunk = file.read(_chunk(at - place))
        cut = chunk.find(b"\n") + 1
        pending.append(chunk[:cut] if cut else chunk)
        at += len(chunk)
        if cut or not chunk:
            del chunk
            yield _joined(pending), place
            return


def _joined(parts: list[Any]) -> bytes:
    """Join byte strings and forget them."""
    whole = b"".join(parts)
    parts.clear()
    return whole


def _compressed_blocks(input: InputFile) -> Iterator[tuple[bytes, int]]:
    """Yield (whole lines, number of the first) of a compressed file."""
    line = 0
    with open_stream(input) as stream:
        for block, _ in _blocks(stream, input, 0, 1 << 62):
            held, lines = [block], block.count(b"\n")
            del block
            yield held.pop(), line
            line += lines


def _chunk(line_so_far: int) -> int:
    """Bytes to read next: a batch's worth, and more in a very long line so joining stays linear."""
    return max(CHUNK, line_so_far)


def _without_bom(chunk: bytes) -> bytes:
    """Blank out a byte order mark at the start of a file, so that offsets stay true."""
    return b"   " + chunk[3:] if chunk.startswith(_BOM) else chunk


def _lines(view: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 starts and stops (line break excluded) of the lines, blank ones too."""
    breaks = np.flatnonzero(view == 0x0A)
    if not len(breaks) or breaks[-1] != len(view) - 1:
        breaks = np.append(breaks, len(view))
    return np.concatenate([[0], breaks[:-1] + 1]), breaks


def _head(input: InputFile) -> list[bytes]:
    """Return the non-blank lines of the first MiB, at least one, however long."""
    if codec_of(input.url):
        blocks = _compressed_blocks(input)
    else:
        whole = Unit(input=0, start=0, stop=min(input.bytes, HEAD_BYTES), bytes=0)
        blocks = _plain_blocks(input, whole)
    for block, _ in blocks:
        lines = [line for line in block.split(b"\n") if line.strip()]
        if lines:
            return lines
    return []


def _loads(line: bytes) -> Any:
    """Return the JSON value of a line, or a sentence (str) saying why it has none."""
    try:
        value = json.loads(line.decode(errors="surrogateescape"))
    except RecursionError:
        return "nested too deeply"
    except json.JSONDecodeError as error:
        return f"column {error.colno}: {error.msg}"
    except ValueError as error:  # a number of more digits than Python converts
        return printable(str(error))
    return value if not isinstance(value, str) else "a JSON string, not an object"


def _no_text(name: str, value: Any) -> str:
    """Return why a record's text is none."""
    if value is MISSING or value is None:
        return f"the field {name!r} is {'missing' if value is MISSING else 'null'}"
    return f"the field {name!r} is a {type(value).__name__}, not a string"


def _encodable(value: Any) -> Any:
    """Return an id or kept value with lone surrogates escaped, so that it can be written."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return value
