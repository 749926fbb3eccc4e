"""Megatron's `.idx`: reading and checking the layout of `megatron.core.datasets.indexed_dataset`.

    offset 0       "MMIDIDX\\0\\0", u64 version 1, u8 dtype code, u64 sequences S, u64 D
    offset 34      i32 [S] tokens of each sequence, i64 [S] its first byte in .bin,
                   i64 [D] first sequence of each document and S, (u8 [S] modes)

All little-endian. The 64-bit blocks are not aligned, so they are copied. Never: unpickles.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<9sQBQQ")
CODES: dict[int, np.dtype[Any]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint16)}
"""dtype code -> how its ids are read. Ids are never negative: int32 (4) has the bits of uint32."""


class IndexDefect(ValueError):
    """An index that is not what it should be; the message says how."""


def index_dtype(data: bytes) -> np.dtype[Any]:
    """Return the dtype of the tokens that an index is of.

    Args:
        data: at least its first 34 bytes.

    Raises:
        IndexDefect: it is no index of version 1, or of values that are no token ids.
    """
    if len(data) < HEAD.size or data[:9] != MAGIC:
        raise IndexDefect("this is not a Megatron index")
    _, version, code, _, _ = HEAD.unpack_from(data)
    if version != 1:
        raise IndexDefect(f"this is version {version} of the format, not 1")
    if code not in CODES:
        raise IndexDefect(f"dtype code {code} is none of token ids: {sorted(CODES)}")
    return CODES[code]


def read_index(data: bytes, dtype: np.dtype[Any], size: int) -> np.ndarray:
    """Return the ends of the documents in tokens, cumulative, as int64 [documents].

    Args:
        dtype: of the tokens, as `index_dtype` says.
        size: bytes of the `.bin`.

    Raises:
        IndexDefect: sequences or documents do not tile the file, or the index is of another size.
    """
    assert index_dtype(data) == dtype
    _, _, _, sequences, entries = HEAD.unpack_from(data)
    expected = HEAD.size + 12 * sequences + 8 * entries
    if len(data) not in (expected, expected + sequences):
        raise IndexDefect(f"it has {len(data):,} bytes, not {expected:,}")
    lengths = np.frombuffer(data, "<i4", sequences, HEAD.size).astype(np.int64)
    starts = np.frombuffer(data, "<i8", sequences, HEAD.size + 4 * sequences)
    first = np.frombuffer(data, "<i8", entries, HEAD.size + 12 * sequences)
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or not np.array_equal(starts, (ends - lengths) * dtype.itemsize):
        raise IndexDefect("its sequences do not follow each other without a gap")
    total = int(ends[-1]) if sequences else 0
    if total * dtype.itemsize != size:
        raise IndexDefect(f"its sequences have {total * dtype.itemsize:,} bytes, .bin {size:,}")
    if not entries or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 0).any():
        raise IndexDefect("its documents do not tile its sequences")
    result: np.ndarray = np.append(0, ends)[first[1:]]
    return result
