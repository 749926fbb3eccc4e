"""Columns inside others: `meta.score` is the field `score` of the object or struct `meta`.

    JSON object, name -> value_of             JSON object -> flattened
    Arrow schema      -> flat_schema          Arrow table, names -> flat_table

A column whose own name holds the dots comes first. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from olm_data.bounded_json import JsonObject
from olm_data.errors import InputError, printable

MISSING = msgspec.UNSET
MOST_DEPTH, MOST_FIELDS = 8, 1000
"""How deep, and how many fields, are listed; deeper ones can be named all the same."""


def value_of(record: JsonObject, name: str) -> Any:
    """Return the value of a JSON object's field, or `MISSING`."""
    if name in record:
        return record[name]
    first, *rest = name.split(".")
    return value_below(record.get(first, MISSING), rest) if rest else MISSING


def value_below(value: Any, parts: Iterable[str]) -> Any:
    """Return what a path of fields leads to from a JSON value, or `MISSING`."""
    for part in parts:
        if not isinstance(value, dict):
            return MISSING
        value = value.get(part, MISSING)
    return value


def flattened(record: JsonObject, prefix: str = "", depth: int = 1) -> Iterator[Any]:
    """Yield (name, value) of an object's fields, each followed by those inside it."""
    for name, value in record.items():
        yield prefix + name, value
        if isinstance(value, dict) and depth < MOST_DEPTH:
            yield from flattened(value, f"{prefix}{name}.", depth + 1)


def flat_schema(schema: pa.Schema, where: str, wanted: Iterable[str] = ()) -> pa.Schema:
    """Return the schema with the fields of its structs as columns of their own, after it.

    Args:
        where: the input, for messages.
        wanted: columns that are read.

    Raises:
        InputError: two columns have the name of one that is read.
    """
    counts = Counter(schema.names)
    for name in wanted:
        if counts[name] > 1:
            raise InputError(
                f"{counts[name]} columns have the name {printable(repr(name))}",
                where=where,
                why="nothing tells which of them is meant",
                fix="rename one of them, or read another column",
            )
    found = {field.name: field for field in schema}
    inside: dict[str, pa.Field] = {}
    for field in schema:
        for name, kind in _fields(field.type, field.name, 1):
            if name not in found and len(inside) < MOST_FIELDS:
                inside.setdefault(name, pa.field(name, kind))
    for name in wanted:
        if name not in found and name not in inside:
            kind = _type_of(schema, name)
            if kind is not None:
                inside[name] = pa.field(name, kind)
    return pa.schema([*schema, *inside.values()]) if inside else schema


def flat_table(table: pa.RecordBatch, names: Iterable[str]) -> pa.RecordBatch:
    """Return the table with those of `names` that are fields of its structs as columns."""
    for name in names:
        if name not in table.schema.names and _type_of(table.schema, name) is not None:
            first, *rest = name.split(".")
            column = table.column(first)
            if isinstance(column, pa.DictionaryArray):
                column = column.dictionary_decode()
            table = table.append_column(name, pc.struct_field(column, rest))
    return table


def stored_name(schema: pa.Schema, name: str) -> str | None:
    """Return the name of the top column that holds a column, or None where there is none."""
    if name in schema.names:
        return name
    return None if _type_of(schema, name) is None else name.split(".")[0]


def _fields(kind: pa.DataType, prefix: str, depth: int) -> Iterator[tuple[str, pa.DataType]]:
    if pa.types.is_struct(kind) and depth < MOST_DEPTH:
        for field in kind:
            name = f"{prefix}.{field.name}"
            yield name, field.type
            yield from _fields(field.type, name, depth + 1)


def _type_of(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Return the type of a field inside a struct, or None where there is none."""
    first, *rest = name.split(".")
    if not rest or schema.names.count(first) != 1:
        return None
    kind = schema.field(first).type
    for part in rest:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(kind.get_field_index(part)).type
    return kind
