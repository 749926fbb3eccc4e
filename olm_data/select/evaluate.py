"""What a `--where` expression says of records: masks of columns, and of statistics.

    columns (Arrow arrays of a table | lists of JSON values) + node -> bool mask
    a table's schema + node -> an error where a condition can never be decided
    smallest, largest, nulls of a row group + node -> can any of its rows match?

Both kinds of columns and the statistics follow the one meaning that `where.py` states. Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, inf, nextafter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from olm_data.arrow_values import as_numpy
from olm_data.errors import InputError, printable
from olm_data.select.where import (
    OPERATORS,
    Compare,
    Flag,
    In,
    IsNull,
    Joined,
    Leaf,
    Node,
    Not,
    kind_of_value,
    leaves,
    wanted_kinds,
)

Three = bool | None
"""True, false or unknown."""

_KERNELS = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}

_ARROW_TYPES = {
    str: pa.large_string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
}
_EXACT = 1 << 53  # integers up to here are doubles too


def matches(node: Node, columns: Mapping[str, Any], rows: int) -> np.ndarray:
    """Return bool [rows]: the expression is true.

    Args:
        columns: by name, each of `rows` values: an Arrow array, or a list of JSON values. A column
            that is not there is null.
    """
    return as_numpy(pc.fill_null(_mask(node, columns, rows), False))


def _mask(node: Node, columns: Mapping[str, Any], rows: int) -> pa.BooleanArray:
    if isinstance(node, Not):
        return pc.invert(_mask(node.part, columns, rows))
    if isinstance(node, Joined):
        join = pc.or_kleene if node.any else pc.and_kleene
        result = _mask(node.parts[0], columns, rows)
        for part in node.parts[1:]:
            result = join(result, _mask(part, columns, rows))
        return result
    column = columns.get(node.column)
    column = pa.nulls(rows) if column is None else _as_array(column)
    if isinstance(column, pa.Array):
        return _of_array(node, column)
    return pa.array([decide(node, value) for value in column], pa.bool_())


def _as_array(values: Any) -> Any:
    """Return JSON values of one kind as an Arrow array, exactly; others as they are."""
    if isinstance(values, pa.Array):
        return values
    types = set(map(type, values)) - {type(None)}
    if types == {int, float} and all(type(v) is not int or abs(v) <= _EXACT for v in values):
        types = {float}
    kind = _ARROW_TYPES.get(types.pop()) if len(types) == 1 else None
    try:
        return values if kind is None else pa.array(values, kind)
    except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):  # a number of more than 64 bits
        return values


def decide(leaf: Leaf, value: Any) -> Three:
    """Return what a condition says of one JSON value."""
    if isinstance(leaf, IsNull):
        return value is None
    if isinstance(leaf, Flag):
        return value if isinstance(value, bool) else None
    kind = kind_of_value(value)
    if kind not in wanted_kinds(leaf):
        return False if leaf == In(leaf.column, ()) and value is not None else None
    if isinstance(leaf, In):
        return any(kind == kind_of_value(one) and value == one for one in leaf.values)
    return bool(OPERATORS[leaf.op](value, leaf.value))


def kind_of_type(kind: pa.DataType) -> str | None:
    """Return what values of an Arrow type are: as `kind_of_value`, None for a type of nulls."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind):
        return None
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view():
        return "string"
    return "other"


def check_types(node: Node, schema: pa.Schema, where: str) -> None:
    """Refuse a condition that no value of its column can decide: it would drop every record.

    Args:
        schema: of the table; a column it lacks is null, so nothing is wrong with it.
        where: the input, for messages.

    Raises:
        InputError: names the column, its type and the condition.
    """
    for leaf in leaves(node):
        wanted = wanted_kinds(leaf)
        if leaf.column not in schema.names or not wanted:
            continue
        kind = kind_of_type(schema.field(leaf.column).type)
        if kind is not None and kind not in wanted:
            raise mismatch(leaf, str(schema.field(leaf.column).type), where)


def mismatch(leaf: Leaf, found: str, where: str) -> InputError:
    """Return the error for a condition that the values of a column cannot decide."""
    return InputError(
        f"--where cannot decide `{printable(str(leaf))}`: the column holds {found}",
        where=where,
        why="a value of another kind never matches, so every record would be left out",
        fix="compare numbers with 3 or 0.5, strings with 'en', booleans with True; "
        "of any other type only `is None` can be asked",
    )


# --- Arrow arrays ------------------------------------------------------------------------------


def _of_array(leaf: Leaf, column: pa.Array) -> pa.BooleanArray:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == pa.string_view():
        column = column.cast(pa.large_string())
    if isinstance(leaf, IsNull):
        return pc.is_null(column)
    kind = kind_of_type(column.type)
    if isinstance(leaf, In) and not leaf.values:
        return _constant(column, False)
    if kind not in wanted_kinds(leaf):
        return pa.nulls(len(column), pa.bool_())
    if isinstance(leaf, Flag):
        return column
    if isinstance(leaf, In):
        return _is_in(column, [value for value in leaf.values if kind_of_value(value) == kind])
    if kind == "number":
        return _number(column, leaf.op, leaf.value)
    return _KERNELS[leaf.op](column, pa.scalar(leaf.value, column.type))


def _is_in(column: pa.Array, values: list[Any]) -> pa.BooleanArray:
    kind = column.type
    if pa.types.is_integer(kind):
        low, high = _integer_range(kind)
        values = [int(v) for v in values if v == floor(v) and low <= v <= high]
    elif pa.types.is_floating(kind):
        column, kind = column.cast(pa.float64()), pa.float64()
        values = [below for v in values for below, above in [_doubles(v)] if below == above]
        values += [-0.0] if 0.0 in values else []  # the kernel tells the two zeros apart
    found = pc.is_in(column, value_set=pa.array(values, kind))
    return pc.if_else(column.is_valid(), found, pa.scalar(None, pa.bool_()))


def _number(column: pa.Array, op: str, value: Any) -> pa.BooleanArray:
    """Compare exactly: the literal is first replaced by its neighbour among the column's values."""
    low: float
    high: float
    below: float
    above: float
    if pa.types.is_integer(column.type):
        (low, high), below, above = _integer_range(column.type), floor(value), ceil(value)
    else:
        column, (low, high) = column.cast(pa.float64()), (-inf, inf)
        below, above = _doubles(value)
    if op in ("==", "!="):
        if below != above or not low <= below <= high:
            return _constant(column, op == "!=")
        return _KERNELS[op](column, pa.scalar(below, column.type))
    if below != above:  # no value of the column lies between its two neighbours
        op = "<=" if op in ("<", "<=") else ">="
    bound = below if op in ("<", "<=") else above
    if not low <= bound <= high:
        return _constant(column, (bound > high) == (op in ("<", "<=")))
    return _KERNELS[op](column, pa.scalar(bound, column.type))


def _integer_range(kind: pa.DataType) -> tuple[int, int]:
    bits = kind.bit_width
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if _signed(kind) else (0, (1 << bits) - 1)


def _signed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_signed_integer(kind))


def _doubles(value: Any) -> tuple[float, float]:
    """Return the largest double that is at most, and the smallest that is at least `value`."""
    try:
        near = float(value)
    except OverflowError:
        most = sys.float_info.max
        return (most, inf) if value > 0 else (-inf, -most)
    if near == value:
        return near, near
    return (near, nextafter(near, inf)) if near < value else (nextafter(near, -inf), near)


def _constant(column: pa.Array, value: bool) -> pa.BooleanArray:
    """Return `value` for each value of a column, unknown for its nulls."""
    return pc.if_else(column.is_valid(), pa.scalar(value), pa.scalar(None, pa.bool_()))


# --- statistics --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Span:
    """What is known of a column's values in a row group.

    Attributes:
        kind: as `kind_of_value`; None where all values are null.
        low, high: bounds of the values, not always reached; None where they are not known.
        nulls: some values may be null.
        nan: some values may be NaN, which no bound covers.
    """

    kind: str | None
    low: Any = None
    high: Any = None
    nulls: bool = True
    nan: bool = False


def can_match(node: Node, spans: Mapping[str, Span]) -> bool:
    """Return whether a row within the spans may match; false is certain, true is not.

    Args:
        spans: of the columns there are; a column without one is null in every row.
    """
    return True in _outcomes(node, spans)


def _outcomes(node: Node, spans: Mapping[str, Span]) -> frozenset[Three]:
    if isinstance(node, Not):
        return frozenset(_not(one) for one in _outcomes(node.part, spans))
    if isinstance(node, Joined):
        join = _or if node.any else _and
        result = _outcomes(node.parts[0], spans)
        for part in node.parts[1:]:
            more = _outcomes(part, spans)
            result = frozenset(join(a, b) for a in result for b in more)
        return result
    span = spans.get(node.column, Span(kind=None))
    if isinstance(node, IsNull):
        return frozenset({True} if span.kind is None else {True, False} if span.nulls else {False})
    unknown: set[Three] = {None} if span.nulls or span.kind is None else set()
    if span.kind is None:
        return frozenset(unknown)
    if span.kind not in wanted_kinds(node) or span.low is None:
        return frozenset({True, False, None})
    return frozenset(_of_span(node, span) | unknown)


def _of_span(leaf: Compare | In | Flag, span: Span) -> set[Three]:
    low, high = span.low, span.high
    if isinstance(leaf, Flag):
        return {low, high}
    values = leaf.values if isinstance(leaf, In) else (leaf.value,)
    values = tuple(value for value in values if kind_of_value(value) == span.kind)
    if isinstance(leaf, Compare) and leaf.op not in ("==", "!="):
        # the order of the bounds decides: if both agree, so does all that lies between them
        decided: set[Three] = {OPERATORS[leaf.op](bound, leaf.value) for bound in (low, high)}
        return decided | ({False} if span.nan else set())
    inside: set[Three] = {False} if span.nan else set()
    if any(low <= value <= high for value in values):
        inside.add(True)
    if not (low == high and low in values):
        inside.add(False)
    unequal = isinstance(leaf, Compare) and leaf.op == "!="
    return {_not(one) for one in inside} if unequal else inside


def span_of(kind: pa.DataType, statistics: Any, rows: int) -> Span:
    """Return what the statistics of a parquet column chunk tell; None tell nothing.

    Args:
        kind: Arrow type of the column.
        statistics: `pyarrow.parquet.Statistics`, or None.
    """
    name = kind_of_type(kind)
    if name is None or statistics is None:
        return Span(kind=name)
    nulls = not statistics.has_null_count or statistics.null_count > 0
    if statistics.has_null_count and statistics.null_count == rows:
        return Span(kind=None)
    nan = bool(pa.types.is_floating(kind))
    ordered = name == "string" or name == "bool" or _signed(kind) or nan
    if not statistics.has_min_max or not ordered or kind == pa.float16():
        return Span(kind=name, nulls=nulls, nan=nan)
    try:
        low, high = statistics.min, statistics.max
    except UnicodeDecodeError:  # a bound that was cut inside a character
        return Span(kind=name, nulls=nulls, nan=nan)
    told = all(kind_of_value(bound) == name and bound == bound for bound in (low, high))
    if not told:
        return Span(kind=name, nulls=nulls, nan=nan)
    return Span(kind=name, low=low, high=high, nulls=nulls, nan=nan)


def _not(value: Three) -> Three:
    return None if value is None else not value


def _and(left: Three, right: Three) -> Three:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _or(left: Three, right: Three) -> Three:
    return _not(_and(_not(left), _not(right)))
