"""NumPy and Python values as Arrow arrays and back, without importing pandas.

    list of str | ndarray  <->  Arrow array

`pa.array` of a list or an ndarray, `to_numpy` and `np.asarray` of an Arrow array import pandas
first, wherever that is installed: 0.3 s of CPU in every process, more than a small run needs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa


def strings(values: Iterable[str | None]) -> pa.StringArray:
    """Return strings as an Arrow array; None is null.

    Raises:
        UnicodeEncodeError: one holds a lone surrogate.
    """
    builder = pa.lib.StringBuilder()
    builder.append_values(values)
    return builder.finish()


def as_mask(chosen: np.ndarray) -> pa.BooleanArray:
    """Return bool[n] as an Arrow array."""
    bits = pa.py_buffer(np.packbits(chosen, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(chosen), [None, bits])


def numbers(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return whole numbers as an Arrow array of the same type; the memory is shared."""
    assert values.dtype.name == str(kind)  # to_pandas_dtype() imports pandas up to Arrow 21
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def as_numpy(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return numbers or truth values, none null, as a NumPy array; numbers are a view."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not pa.types.is_boolean(column.type):
        return np.from_dlpack(column)
    if len(column) == 0:
        return np.zeros(0, bool)
    bits = np.frombuffer(column.buffers()[1], np.uint8)
    start, stop = column.offset, column.offset + len(column)
    return np.unpackbits(bits, count=stop, bitorder="little")[start:].astype(bool)


def is_text(kind: pa.DataType) -> bool:
    """Whether values of a type are texts or bytes."""
    return (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
        or kind in (pa.string_view(), pa.binary_view())
    )
