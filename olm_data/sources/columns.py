"""What parquet, Arrow and hub tables share: the check for columns, and tables to batches.

Also: columns inside others: `meta.score` is the field `score` of the object or struct `meta`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from olm_data.arrow_values import as_mask, is_text, strings
from olm_data.bounded_json import JsonObject
from olm_data.dataset.inputs import InputFile, KeepType, ReadOptions, keep_type
from olm_data.errors import InputError, printable, quoted, said_by, suggest
from olm_data.select.evaluate import check_types, matches
from olm_data.select.where import columns
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.buffers import from_column
from olm_data.sources.limits import MAX_BATCH_BYTES

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


def used_columns(options: ReadOptions) -> list[str]:
    """Return the columns that are read, the text first, each once."""
    tested = [] if options.condition is None else columns(options.condition)
    kept = [name for name, _ in options.keep]
    names = [options.text_column, *filter(None, [options.id_column]), *kept, *tested]
    return list(dict.fromkeys(names))


def table_schema(
    found: pa.Schema, input: InputFile, options: ReadOptions, *, typed: bool = True
) -> pa.Schema:
    """Return a table's schema with the fields of its structs as columns, if it can be read.

    Args:
        typed: False for a table of texts, whose values are compared as what they spell.

    Raises:
        InputError: there is no text column (names those there are), a column that is read is there
            twice, or is of a type that `options.where` cannot decide.
    """
    schema = flat_schema(found, input.path, used_columns(options))
    if options.text_column not in schema.names:
        known = [printable(name) for name in schema.names[:40]]
        raise InputError(
            f"there is no column {options.text_column!r} for the text",
            where=input.path,
            why=f"its columns are: {', '.join(known)}",
            fix=f"say --text-column COLUMN ({suggest(options.text_column, known)})",
        )
    if typed and options.condition is not None:
        check_types(options.condition, schema, input.path)
    return schema


def kinds_of(schema: pa.Schema) -> ColumnKinds:
    """Return the type to keep each column as."""
    return {field.name: {kind_of(field.type)} for field in schema}


def table_batches(
    scan: Scan, table: pa.RecordBatch, positions: np.ndarray, chosen: np.ndarray | None = None
) -> Iterator[DocumentBatch]:
    """Yield the documents of a record batch; columns it does not have are null.

    Args:
        positions: int64[rows]; rows after the last one to read are left out.
        chosen: bool[rows], where `options.where` is true, if it is known already.
    """
    input, options = scan.input, scan.options
    table = flat_table(table, used_columns(options))
    text = table.column(options.text_column)
    if len(text) > 1 and decoded_bytes(text) > MAX_BATCH_BYTES:
        half = len(text) // 2
        for part in (slice(0, half), slice(half, None)):
            yield from table_batches(
                scan, table[part], positions[part], None if chosen is None else chosen[part]
            )
        return
    names = table.schema.names
    if input.until is not None and len(positions) and positions[-1] > input.until:
        rows = int(np.searchsorted(positions, input.until, side="right"))
        table, positions = table.slice(0, rows), positions[:rows]
        chosen = None if chosen is None else chosen[:rows]
    filtered = 0
    if options.where is not None:
        chosen = chosen_rows(table, options) if chosen is None else chosen
        filtered = len(chosen) - int(chosen.sum())
    if chosen is not None and filtered:
        table, positions = table.filter(as_mask(chosen)), positions[chosen]

    def column(name: str, kind: str) -> pa.Array:
        found = table.column(name) if name in names else pa.nulls(len(table), keep_type(kind))
        return as_kept(found, kind, name, input.path)

    yield from from_column(
        scan,
        table.column(options.text_column),
        positions=positions,
        ids=None if options.id_column is None else column(options.id_column, "string"),
        keep=kept_columns(options, column),
        filtered=filtered,
    )


def chosen_rows(table: pa.RecordBatch, options: ReadOptions) -> np.ndarray:
    """Return bool[rows]: `options.where` is true. Needs its columns only."""
    assert options.condition is not None
    table = flat_table(table, columns(options.condition))
    wanted = [name for name in columns(options.condition) if name in table.schema.names]
    return matches(options.condition, {name: table.column(name) for name in wanted}, len(table))


_FITTING: dict[str, tuple[type, ...]] = {"int64": (int,), "double": (int, float), "bool": (bool,)}


def kept_columns(
    options: ReadOptions, column: Callable[[str, KeepType], pa.Array]
) -> pa.RecordBatch | None:
    """Return what `column(name, type)` gives for each kept column; None where nothing is kept."""
    if not options.keep:
        return None
    columns = [column(name, kind) for name, kind in options.keep]
    return pa.RecordBatch.from_arrays(columns, schema=options.keep_schema)


def kind_of(kind: pa.DataType) -> str:
    """Return the kept type (one of `KEEP_TYPES`) that holds values of an Arrow type."""
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) and kind != pa.uint64():
        return "int64"
    if pa.types.is_floating(kind):
        return "double"
    return "string"


def kind_of_json(value: object) -> str | None:
    """Return the kept type that holds a JSON value exactly; None for null."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return "int64"
    return "double" if isinstance(value, float) else "string"


def common_kind(kinds: Collection[str]) -> str:
    """Return the kept type for values of several: numbers meet as double, all else as string."""
    if len(kinds) == 1:
        return next(iter(kinds))
    return "double" if set(kinds) == {"int64", "double"} else "string"


def plain_values(values: list[Any], kind: str, name: str, where: str) -> pa.Array:
    """Return JSON values as a kept column; a value that is no string is kept as its JSON text.

    Raises:
        InputError: a value does not fit the type.
    """
    if kind == "string":
        values = [_spelled(value) for value in values]
    else:  # Arrow would cut 2.5 to 2, and take True for 1
        wrong = next((v for v in values if v is not None and type(v) not in _FITTING[kind]), None)
        if wrong is not None:
            raise _no_fit(name, kind, where, ValueError(f"{quoted(wrong)} is none"))
    try:
        made = strings(values) if kind == "string" else pa.array(values, keep_type(kind))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError) as error:
        raise _no_fit(name, kind, where, error) from error
    return as_kept(made, kind, name, where)


def _spelled(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def as_kept(column: pa.Array, kind: str, name: str, where: str) -> pa.Array:
    """Return a column as the Arrow type that `kind` names; see `KEEP_TYPES`.

    As strings, numbers are spelled out and lists and structs are JSON texts.

    Raises:
        InputError: a value does not fit the type.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if decoded_bytes(column) > MAX_BATCH_BYTES:
        raise too_much(name, where)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        if kind == "string" and pa.types.is_nested(column.type):
            return strings([_spelled(value) for value in column.to_pylist()])
        wanted = keep_type(kind)
        result = column if column.type == wanted else column.cast(wanted)
        if kind == "string":
            result.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError) as error:
        raise _no_fit(name, kind, where, error) from error
    return result


def _no_fit(name: str, kind: str, where: str, error: Exception) -> InputError:
    return InputError(
        f"a value of the column {name!r} does not fit its type {kind}",
        where=where,
        why=said_by(error, 200),
        fix=f"keep it as text: --keep {printable(name)}:string",
    )


def too_much(name: str, where: str) -> InputError:
    """Return the error for a column that would fill the memory."""
    return InputError(
        f"the column {name!r} unpacks to too much: it may be a bomb",
        where=where,
        fix="leave the column out (--keep, --id-column)",
    )


def decoded_bytes(column: pa.Array) -> int:
    """Return the bytes a dictionary column of text becomes when it is decoded; 0 for others."""
    if not isinstance(column, pa.DictionaryArray) or not is_text(column.type.value_type):
        return 0
    lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
    return int(pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0)
