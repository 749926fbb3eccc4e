"""What a `--where` expression says of records: masks of columns, and of parquet statistics.

    columns (Arrow arrays of a table | lists of JSON values) + node -> bool mask
    a table's schema + node -> an error where a condition can never be decided
    footer of a parquet file + node -> the row groups that may hold a match

`_where` builds all of it from `pyarrow.compute`: given arrays it computes the mask, given fields an
expression for Arrow's own look at the statistics. `not` is moved down to the conditions ("which
rows make it false?"), so unknown counts as "no" everywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, inf
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

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
    columns,
    kind_of_value,
    leaves,
)

_KERNELS = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_ARROW_TYPES = {str: pa.large_string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_EXACT = 1 << 53  # integers up to here are doubles too


def matches(
    node: Node, columns: Mapping[str, pa.Array | Sequence[Any]], rows: int
) -> NDArray[np.bool_]:
    """Return bool [rows]: the expression is true.

    Args:
        columns: by name, each of `rows` values: an Arrow array, or a list of JSON values. A column
            that is not there is null.
    """
    never = pc.is_valid(pa.nulls(rows))
    present = {name: _as_array(values) for name, values in columns.items()}
    typed = {name: (getattr(values, "type", None), values) for name, values in present.items()}
    return as_numpy(pc.fill_null(_where(node, True, typed, pa.nulls(rows), never), False))


def matching_groups(node: Node, metadata: Any, schema: pa.Schema) -> set[int]:
    """Return the row groups whose statistics do not exclude a match.

    Of a column with nulls Arrow excludes nothing but what asks for nulls.

    Args:
        metadata: `pyarrow.parquet.FileMetaData`.
        schema: of the table as it is read; names that the file lacks have no statistics.
    """
    import pyarrow.dataset as ds

    footer = pa.BufferOutputStream()
    metadata.write_metadata_file(footer)  # the footer is not read a second time
    fragment = ds.ParquetFileFormat().make_fragment(pa.BufferReader(footer.getvalue()))
    used = pa.schema([schema.field(name) for name in columns(node) if name in schema.names])
    fields = {field.name: (field.type, pc.field(field.name)) for field in used}
    expression = _where(node, True, fields, pc.scalar(None), pc.scalar(False))
    return {group.id for group in fragment.subset(expression, schema=used).row_groups}


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


def decide(leaf: Leaf, value: Any) -> bool | None:
    """Return what a condition says of one JSON value; None is unknown."""
    if isinstance(leaf, IsNull):
        return value is None
    if isinstance(leaf, Flag):
        return value if isinstance(value, bool) else None
    kind = kind_of_value(value)
    if kind not in leaf.kinds:
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
        wanted = leaf.kinds
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


# --- conditions on arrays, or on fields --------------------------------------------------------


def _where(
    node: Node,
    want: bool,
    columns: Mapping[str, tuple[pa.DataType | None, Any]],
    nulls: Any,
    never: Any,
) -> Any:
    """Return where an expression is `want`; null is no, too.

    Args:
        columns: name -> its type, None of a list of JSON values, and the array or field.
        nulls: what stands for a column that is not there.
        never: false in each row.
    """
    if isinstance(node, Not):
        return _where(node.part, not want, columns, nulls, never)
    if isinstance(node, Joined):
        join = pc.or_kleene if node.any == want else pc.and_kleene
        result = _where(node.parts[0], want, columns, nulls, never)
        for part in node.parts[1:]:
            result = join(result, _where(part, want, columns, nulls, never))
        return result
    kind, column = columns.get(node.column, (pa.null(), nulls))
    if kind is None:
        return pa.array([decide(node, value) is want for value in column], pa.bool_())
    return _of_column(node, want, kind, column, never)


def _of_column(leaf: Leaf, want: bool, kind: pa.DataType, column: Any, never: Any) -> Any:
    if isinstance(leaf, IsNull):
        return pc.is_null(column) if want else pc.is_valid(column)
    if isinstance(leaf, In) and not leaf.values:
        return never if want else pc.is_valid(column)
    if kind_of_type(kind) not in leaf.kinds:
        return never
    if pa.types.is_dictionary(kind):
        kind, column = kind.value_type, column.cast(kind.value_type)
    if kind in (pa.string_view(), pa.float16()):  # no kernels in all versions
        kind = pa.float32() if kind == pa.float16() else pa.large_string()
        column = column.cast(kind)
    if isinstance(leaf, Flag):
        return column if want else pc.invert(column)
    if isinstance(leaf, In):
        result, unequal = _in(leaf, want, kind, column), False
    else:
        result, unequal = _compare(leaf, want, kind, column, never), leaf.op == "!="
    if pa.types.is_floating(kind) and unequal == want:
        # Statistics do not count NaN, so they cannot say that a row group holds none.
        by_statistics = isinstance(column, pc.Expression)
        return pc.scalar(True) if by_statistics else pc.or_kleene(result, pc.is_nan(column))
    return result


def _in(leaf: In, want: bool, kind: pa.DataType, column: Any) -> Any:
    same = [value for value in leaf.values if kind_of_value(value) == kind_of_type(kind)]
    values = [low for low, high in (_neighbours(value, kind) for value in same) if low == high]
    if pa.types.is_floating(kind) and 0.0 in values:
        values += [0.0, -0.0]  # the kernel tells the two zeros apart
    found = pc.is_in(column, value_set=pa.array(values, kind))
    return found if want else pc.and_kleene(pc.is_valid(column), pc.invert(found))


def _compare(leaf: Compare, want: bool, kind: pa.DataType, column: Any, never: Any) -> Any:
    op, (below, above) = leaf.op, _neighbours(leaf.value, kind)
    bound = below if op in ("<", "<=") else above
    if below != above:  # no value of the column lies between the two neighbours
        if op in ("==", "!=") or bound is None:
            return pc.is_valid(column) if (op == "!=") == want else never
        op = "<=" if op in ("<", "<=") else ">="
    result = _KERNELS[op](column, pa.scalar(bound, kind))
    return result if want else pc.invert(result)


def _neighbours(value: Any, kind: pa.DataType) -> tuple[Any, Any]:
    """Return the largest value of a type that is at most, and the smallest at least `value`.

    So that comparisons are exact: Arrow would round a literal to the column's type, or the column
    to the literal's. None where the type has no such number.
    """
    if pa.types.is_integer(kind):
        limits = np.iinfo(kind.to_pandas_dtype())
        low, high = int(limits.min), int(limits.max)
        below = min(floor(value), high) if value >= low else None
        return below, max(ceil(value), low) if value <= high else None
    if not pa.types.is_floating(kind):
        return value, value
    number = kind.to_pandas_dtype()
    with np.errstate(over="ignore"):
        try:
            near = number(value)
        except OverflowError:  # a whole number beyond all doubles
            near = number(inf if value > 0 else -inf)
        below = near if float(near) <= value else np.nextafter(near, number(-inf))
        above = near if float(near) >= value else np.nextafter(near, number(inf))
    return float(below), float(above)
