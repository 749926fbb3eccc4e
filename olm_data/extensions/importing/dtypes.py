"""Which dtype the bytes of a token file look like, where nothing beside it says so. Pure.

    bytes, vocabulary -> `defect`     why they cannot be ids of a dtype
                      -> `looks_like` the dtype they can be ids of

A range alone does not tell: 64-bit ids read as uint32 are ids and zeros in turn, and ids of the
other byte order are often below the vocabulary. So three things are looked at: every value is
below the vocabulary, values do not vanish at every second, or at three of four places, and it is
the high byte that repeats, as in all text: common tokens have low ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from olm_data.counts import counted

DTYPES = tuple(np.dtype(name) for name in ("<u2", "<u4", "<i8", ">u2", ">u4", ">i8"))
_HALVES = ("x0", "0x", "x0x0", "0x0x", "x000", "000x", "xx00", "00xx")  # in both byte orders
_FEWEST = 8  # values: of fewer, zeros in turn may be chance
_SAMPLE = 1 << 16  # values whose bytes are counted


def defect(
    data: bytes, dtype: np.dtype[Any], vocab_size: int, *, first: int = 0, width_known: bool = False
) -> str | None:
    """Return why bytes cannot be token ids of a dtype; None where they can.

    Args:
        data: of a file, from a multiple of 8 bytes on.
        first: number of its first token, for messages.
        width_known: only the byte order is in question, as a sidecar proves the width.
    """
    ids = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    if not len(ids):
        return None
    for place in (int(ids.argmax()), int(ids.argmin())):
        if not 0 <= ids[place] < vocab_size:
            entries = f"the tokenizer has {counted(vocab_size, 'entry')}"
            return f"token {first + place:,} is {int(ids[place]):,}, and {entries}"
    if not width_known and _in_turn(ids):
        return f"at least every second value is 0: these are wider tokens than {dtype.name}"
    if _swapped(ids, vocab_size):
        return f"these are {dtype.name} tokens of the other byte order, by how often bytes repeat"
    return None


def looks_like(data: bytes, vocab_size: int) -> np.dtype[Any] | None:
    """Return the narrowest dtype that fits, little-endian ones first; None where none does."""
    wide_enough = (d for d in DTYPES if d.itemsize > 2 or vocab_size <= 1 << 16)
    return next((d for d in wide_enough if defect(data, d, vocab_size) is None), None)


def advice(found: np.dtype[Any] | None) -> str:
    """Return what to do with a file that looks like a dtype."""
    if found is None:
        return "say the right --dtype and the --tokenizer that made the file"
    if found in DTYPES[:2]:
        return f"it looks like {found.name}: say --dtype {found.name}"
    name = f"big-endian {found.name}" if found.byteorder == ">" else found.name
    return (
        f"it looks like {name}: write it as uint32, "
        f"numpy.fromfile(FILE, '{found.str}').astype('<u4').tofile(NEW), and say --dtype uint32"
    )


def _in_turn(ids: np.ndarray) -> bool:
    """Whether all ids at some places of each 8 bytes are 0, as halves of wider tokens are."""
    if len(ids) < _FEWEST:
        return False
    bits = np.bitwise_or.reduce(ids[: len(ids) // 4 * 4].view("u8"), keepdims=True)
    return "".join("x" if one else "0" for one in bits.view(ids.dtype)) in _HALVES


def _swapped(ids: np.ndarray, vocab_size: int) -> bool:
    """Whether 2-byte ids are rather those of the other byte order."""
    if ids.dtype.itemsize > 2:
        return False  # ids whose first byte is above 0 are beyond all vocabularies
    if int(ids.byteswap().max()) >= vocab_size:
        return False
    some = ids[:_SAMPLE]
    unpadded = some[some != np.bincount(some).argmax()]
    for part in (some, unpadded):  # one id that comes most of the time says nothing
        low, high = (_pairs(byte) for byte in (part & 0xFF, part >> 8))
        if low > 2 * high + 16:
            return True
    return False


def _pairs(part: np.ndarray) -> int:
    """Return how many pairs of bytes are equal."""
    counts = np.bincount(part, minlength=256)
    return int((counts * (counts - 1)).sum()) // 2
