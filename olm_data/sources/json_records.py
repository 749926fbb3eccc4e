"""JSON records, decoded for the wanted fields only, into batches of documents.

    block of lines -> msgspec, typed, all lines at once -> buffers     an odd line: one by one
    records        -> one by one, each explained        -> buffers

A record that cannot be a document is a drop with a reason, never an error. The first records of a
file tell its fields: none with the text field is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from olm_data.dataset.inputs import InputFile, KeepType, ReadOptions
from olm_data.decoding import decoder
from olm_data.errors import InputError, printable, suggest
from olm_data.select.evaluate import matches, mismatch
from olm_data.select.where import columns, kind_of_value, leaves
from olm_data.sources.base import ColumnKinds, DocumentBatch, Drop, Scan
from olm_data.sources.buffers import from_buffers, joined
from olm_data.sources.columns import (
    MISSING,
    MOST_FIELDS,
    flattened,
    kept_columns,
    kind_of_json,
    plain_values,
    used_columns,
    value_below,
    value_of,
)
from olm_data.sources.formats import refuse_other_bytes

_SURROGATE = re.compile("[\ud800-\udfff]")
_FIELDS = decoder(dict[str, msgspec.Raw])


class _NoDocument(Exception):
    """A record is no document.

    Attributes:
        reason: a key of `DROP_REASONS`, or "filtered".
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail)
        self.reason = reason


class Records:
    """Decodes blocks of lines, or single records, of one input into batches."""

    def __init__(self, scan: Scan) -> None:
        self._scan, options = scan, scan.options
        self._condition = options.condition
        names = used_columns(options)
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
        self._decoder = decoder(self._type)
        self._key = json.dumps(options.text_column, ensure_ascii=False).encode()

    def decode(self, block: bytes, place: int) -> Iterator[DocumentBatch]:
        """Decode a block of whole lines, which is not kept; return its documents.

        Args:
            place: byte offset of the block in the file, or number of its first line.
        """
        input = self._scan.input
        view = np.frombuffer(block, dtype=np.uint8)
        starts, stops = _lines(view)
        by_line = input.position == "line"
        if by_line and input.until is not None:
            count = input.until + 1 - place
            starts, stops = starts[:count], stops[:count]
        number = np.arange(len(starts), dtype=np.int64)
        records = self._all(block, view, starts, stops)
        if records is None:
            # Blank lines, or something odd: without blank lines it may still go in one piece.
            spans = zip(starts.tolist(), stops.tolist(), strict=True)
            full = np.array([bool(block[a:b].strip()) for a, b in spans], dtype=bool)
            if not full.all():
                starts, stops, number = starts[full], stops[full], number[full]
                records = self._all(block, view, starts, stops)
        positions = place + (number if by_line else starts)
        if records is None:
            spans = zip(starts.tolist(), stops.tolist(), strict=True)
            return self.decode_each((block[a:b] for a, b in spans), positions)
        return self._batches(records, positions, len(records))

    def decode_each(
        self, records: Iterable[bytes], positions: np.ndarray
    ) -> Iterator[DocumentBatch]:
        """Decode records one by one; return their documents.

        Args:
            positions: int64[records].
        """
        found: list[Any] = []
        places: list[int] = []
        drops: list[Drop] = []
        filtered = replaced = 0
        for raw, place in zip(records, positions.tolist(), strict=True):
            try:
                record, mended = self._one(raw)
            except _NoDocument as error:
                if error.reason == "filtered":
                    filtered += 1
                else:
                    drops.append(self._scan.drop(error.reason, place, str(error), raw))
            else:
                found.append(record)
                places.append(place)
                replaced += mended
        kept = np.array(places, dtype=np.int64)
        return self._batches(found, kept, len(positions), drops, filtered, replaced)

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
        if block.count(self._key) > len(starts):
            spans = zip(starts.tolist(), stops.tolist(), strict=True)
            if any(self._has_two_texts(block[a:b]) for a, b in spans):
                return None
        return list(records)

    def _one(self, line: bytes) -> tuple[Any, bool]:
        """Decode one record; return it, and whether its text was mended.

        Raises:
            _NoDocument: it is malformed, has no text, or is filtered out.
        """
        if self._has_two_texts(line):
            name = printable(self._scan.options.text_column)
            raise _NoDocument("malformed", f"the field {name!r} stands twice")
        try:
            record = self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._careful(line)
        text = next(self._texts([record]))
        if not isinstance(text, str):
            self._require_match(record)
            raise self._no_text(text)
        return record, False

    def _has_two_texts(self, line: bytes) -> bool:
        """Whether the text field stands twice, where decoders silently take the last one.

        The name stands as often in other fields as in their raw values; only what stands beside
        those can be a second field.
        """
        named = line.count(self._key)
        if named < 2:
            return False
        pairs: list[tuple[str, Any]] = []
        try:
            values = _FIELDS.decode(line).values()
            if named - sum(bytes(value).count(self._key) for value in values) < 2:
                return False
            text = line.decode(errors="surrogateescape")
            json.loads(text, object_pairs_hook=lambda found: pairs.__setitem__(slice(None), found))
        except (msgspec.MsgspecError, ValueError, RecursionError):  # who decodes it says why
            return False
        return [name for name, _ in pairs].count(self._scan.options.text_column) > 1

    def _careful(self, line: bytes) -> tuple[Any, bool]:
        """Decode a record the typed decoder refuses: bad text is told from bad metadata beside it.

        Raises:
            _NoDocument: as `_one`.
        """
        value = _loads(line)
        if not isinstance(value, dict):
            found = "string" if isinstance(value, str) else type(value).__name__
            raise _NoDocument("malformed", f"a JSON {found}, not an object")
        name = self._scan.options.text_column
        text = value_of(value, name)
        fields = {a: _encodable(value[n]) for n, a in self._attribute.items() if n in value}
        record = self._type(**fields)
        self._require_match(record)
        if not isinstance(text, str):
            raise self._no_text(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self._scan.options.on_invalid != "replace":
                detail = f"character {error.start} of the text: {error.reason}"
                raise _NoDocument("invalid_utf8", detail) from error
            mended = value_of(json.loads(line.decode(errors="replace")), name)
            setattr(record, self._attribute[name], _SURROGATE.sub("\ufffd", mended))
            return record, True
        setattr(record, self._attribute[name], text)
        return record, False

    def _require_match(self, record: Any) -> None:
        """Refuse a record that the condition leaves out: then it is not called bad."""
        if not self._matching([record])[0]:
            raise _NoDocument("filtered")

    def _no_text(self, found: object) -> _NoDocument:
        if found is MISSING or found is None:
            what = "missing" if found is MISSING else "null"
        else:
            what = f"a {type(found).__name__}, not a string"
        return _NoDocument("no_text", f"the field {self._scan.options.text_column!r} is {what}")

    def _matching(self, records: list[Any]) -> np.ndarray:
        """Return bool[records]: which meet the condition."""
        if self._condition is None:
            return np.ones(len(records), bool)
        values = {name: self._values(records, name) for name in columns(self._condition)}
        return matches(self._condition, values, len(records))

    def _values(self, records: list[Any], name: str) -> list[Any]:
        return [None if value is MISSING else value for value in self._each(records, name)]

    def _texts(self, records: Iterable[Any]) -> Iterator[Any]:
        return self._each(records, self._scan.options.text_column)

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
        self,
        records: list[Any],
        positions: np.ndarray,
        rows_in: int,
        dropped: Sequence[Drop] = (),
        filtered: int = 0,
        replaced: int = 0,
    ) -> Iterator[DocumentBatch]:
        if self._condition is not None:
            chosen = self._matching(records)
            filtered += len(chosen) - int(chosen.sum())
            records, positions = list(compress(records, chosen)), positions[chosen]
        yield from record_batches(
            self._scan,
            [text.encode() for text in self._texts(records)],
            partial(self._values, records),
            positions=positions,
            dropped=dropped,
            rows_in=rows_in,
            filtered=filtered,
            replaced=replaced,
        )


def record_batches(
    scan: Scan, texts: Sequence[bytes], values: Callable[[str], list[Any]], **counted: Any
) -> Iterator[DocumentBatch]:
    """Yield the documents of JSON records, with their ids and kept fields.

    Args:
        values: gives those of a field, None where a record lacks it.
        counted: positions, and what was read besides: as of `from_buffers`.
    """
    options = scan.options

    def column(name: str, kind: KeepType) -> pa.Array:
        return plain_values(values(name), kind, name, scan.input.path)

    ids = None if options.id_column is None else column(options.id_column, "string")
    keep = kept_columns(options, column)
    return from_buffers(scan, *joined(texts), ids=ids, keep=keep, decoded=True, **counted)


def _lines(view: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 starts and stops (line break excluded) of the lines, blank ones too."""
    breaks = np.flatnonzero(view == 0x0A)
    if not len(breaks) or breaks[-1] != len(view) - 1:
        breaks = np.append(breaks, len(view))
    return np.concatenate([[0], breaks[:-1] + 1]), breaks


@dataclass
class FieldSeen:
    """A field at the start of a file: kinds of its values, for conditions and to keep them."""

    kinds: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)

    def add(self, value: object) -> None:
        """Note a value; null is of any kind."""
        if value is not None:
            self.kinds.add(str(kind_of_value(value)))
            self.kept.add(str(kind_of_json(value)))


def field_kinds(head: Sequence[bytes], input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Return the fields of the first records of a file.

    Raises:
        InputError: as `require_text`, or values are of a kind that `options.where` cannot decide.
    """
    seen = require_text(head, input, options)
    for leaf in () if options.condition is None else leaves(options.condition):
        kinds = seen[leaf.column].kinds if leaf.column in seen else set()
        if kinds and leaf.kinds and not kinds & leaf.kinds:
            held = " and ".join(sorted(f"{kind}s" for kind in kinds))
            raise mismatch(leaf, f"{held} at the start of the file", input.path)
    return {name: found.kept for name, found in seen.items()}


def require_text(
    head: Sequence[bytes], input: InputFile, options: ReadOptions
) -> dict[str, FieldSeen]:
    """Return the fields of the first records of a file, in order of appearance.

    Raises:
        InputError: names the fields there are.
    """
    seen: dict[str, FieldSeen] = {}
    for record in head:
        try:
            value = _loads(record)
        except _NoDocument:
            continue
        if isinstance(value, dict):
            for name, one in flattened(value):
                if name in seen or len(seen) < MOST_FIELDS:
                    seen.setdefault(name, FieldSeen()).add(one)
            if value_of(value, options.text_column) is not MISSING:
                seen.setdefault(options.text_column, FieldSeen())
    if options.text_column in seen or not head:
        return seen
    if not seen:
        refuse_other_bytes(b"\n".join(head), input)
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


def _loads(record: bytes) -> object:
    """Return the JSON value of a record.

    Raises:
        _NoDocument: it has none; says why.
    """
    try:
        return json.loads(record.decode(errors="surrogateescape"))
    except RecursionError as error:
        raise _NoDocument("malformed", "nested too deeply") from error
    except json.JSONDecodeError as error:
        raise _NoDocument("malformed", f"column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise _NoDocument("malformed", printable(str(error))) from error


def _encodable(value: object) -> object:
    """Return an id or kept value with lone surrogates escaped, so that it can be written."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return value
