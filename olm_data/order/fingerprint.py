"""A digest of where rows of a run come from: equal for two schedules that begin alike. Pure.

Schedule, sample_rows(rows of the shorter one) --schedule_sha256--> sha256
"""

from __future__ import annotations

import hashlib

import numpy as np

from olm_data.order.schedule import Schedule

SAMPLE = 1 << 16


def sample_rows(rows: int) -> np.ndarray:
    """Return int64[m]: all of `rows` rows, or, of more than 2^16, a quarter of 2^16 at each end
    and the rest evenly between."""
    if rows <= SAMPLE:
        return np.arange(rows, dtype=np.int64)
    end, middle = SAMPLE // 4, SAMPLE // 2
    step = (rows - 2 * end) // middle
    between = end + step * np.arange(middle, dtype=np.int64)
    return np.concatenate([np.arange(end), between, np.arange(rows - end, rows)])


def schedule_sha256(schedule: Schedule, rows: np.ndarray) -> str:
    """Return the sha256 of where `rows` (int64[m]) come from.

    Digested: the names of the sources that are drawn, each after its length in bytes, then for all
    rows, as little-endian int64, the index among these names, the epoch, and the row of the source.
    """
    found = schedule.locate(rows)
    drawn, index = np.unique(found.source, return_inverse=True)
    digest = hashlib.sha256()
    for source in drawn.tolist():
        name = schedule.names[source].encode()
        digest.update(len(name).to_bytes(8, "little") + name)
    for column in (index, found.epoch, found.row):
        digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    return digest.hexdigest()
