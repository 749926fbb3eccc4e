"""Locks that go on where an older one ends, and the digest that shows the older rows unchanged.

    Schedule, rows --places_digest--> sha256        Lock.extends: Extended, one an older lock

Pure. Never: read a file.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from olm_data.bounded_json import Size
from olm_data.order.schedule import Schedule

SAMPLE = 1 << 16


class Extended(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An older lock whose rows are the first ones of this lock.

    Attributes:
        digest: of the older lock.
        rows: of the older lock.
        order_sha256: `places_digest` of `sample_rows(rows)`, the same in both locks.
    """

    digest: str
    rows: Size
    order_sha256: str


def sample_rows(rows: int) -> np.ndarray:
    """Return int64[m]: all of `rows` rows, or, of more than 2^16, a quarter of 2^16 at each end
    and the rest evenly between."""
    if rows <= SAMPLE:
        return np.arange(rows, dtype=np.int64)
    end, middle = SAMPLE // 4, SAMPLE // 2
    step = (rows - 2 * end) // middle
    between = end + step * np.arange(middle, dtype=np.int64)
    return np.concatenate([np.arange(end), between, np.arange(rows - end, rows)])


def places_digest(schedule: Schedule, rows: np.ndarray) -> str:
    """Return the sha256 of where `rows` (int64[m]) come from.

    Digested: the names of the sources that are drawn, each after its length in bytes, then for all
    rows, as little-endian int64, the index among these names, the epoch, and the row of the source.
    """
    place = schedule.locate(rows)
    drawn, index = np.unique(place.source, return_inverse=True)
    digest = hashlib.sha256()
    for source in drawn.tolist():
        name = schedule.names[source].encode()
        digest.update(len(name).to_bytes(8, "little") + name)
    for column in (index, place.epoch, place.row):
        digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    return digest.hexdigest()
