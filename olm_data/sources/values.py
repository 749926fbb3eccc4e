"""Values beside the text, as Arrow columns: ids and kept columns.

JSON values | Arrow column  ->  the kinds of `KEEP_TYPES`  ->  Arrow arrays
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from olm_data.arrow_values import strings
from olm_data.dataset.inputs import KeepType, ReadOptions, keep_type
from olm_data.errors import InputError, printable, quoted, said_by
from olm_data.sources.limits import MAX_BATCH_BYTES

_FITTING: dict[str, tuple[type, ...]] = {
    "int64": (int,),
    "double": (int, float),
    "bool": (bool,),
}


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
    return as_kept(_array(values, kind, name, where), kind, name, where)


def _array(values: list[Any], kind: str, name: str, where: str) -> pa.Array:
    try:
        return strings(values) if kind == "string" else pa.array(values, keep_type(kind))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError) as error:
        raise _no_fit(name, kind, where, error) from error


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


def is_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
        or kind in (pa.string_view(), pa.binary_view())
    )
