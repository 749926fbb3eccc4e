"""Which rows a step is made of and back, and the digest of its order."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_data.mixture.skip import KeptRows
from olm_data.mixture.steps import LEFT_OVER, SKIPPED, Steps, order_digest

TOTAL = 60
ranges = st.lists(
    st.tuples(st.integers(0, TOTAL - 1), st.integers(1, TOTAL)).filter(lambda r: r[0] < r[1]),
    max_size=4,
)


@given(ranges, st.integers(1, 20))
def test_every_row_is_in_its_step_skipped_or_left_over(skip, size):
    steps = Steps(TOTAL, size, skip)
    wanted = {int(r): (t, i) for t in range(steps.count) for i, r in enumerate(steps.rows(t))}
    step, place = steps.step_of(np.arange(TOTAL))
    for row in range(TOTAL):
        if row in wanted:
            assert (step[row], place[row]) == wanted[row]
        elif any(a <= row < b for a, b in skip):
            assert step[row] == SKIPPED
        else:
            assert step[row] == LEFT_OVER
    assert len(wanted) == KeptRows(TOTAL, skip).count // size * size


def test_a_step_that_is_not_there_is_refused_with_those_that_are():
    steps = Steps(TOTAL, 8, [(8, 16)])
    assert steps.rows(1).tolist() == list(range(16, 24))
    with pytest.raises(UsageError, match="numbered from 1 to 6"):
        steps.rows(6)
    with pytest.raises(UsageError, match="no step 0"):
        steps.rows(-1)
    with pytest.raises(UsageError, match="fewer than a step's 61"):
        Steps(TOTAL, 61).rows(0)
    with pytest.raises(UsageError, match="a step of 0 rows"):
        Steps(TOTAL, 0)


def test_the_order_digest_is_the_documented_one_and_names_the_lock():
    rows = np.array([3, 1 << 40], np.int64)
    lock = "ab" * 32
    raw = lock.encode() + b"\3" + bytes(7) + bytes(5) + b"\1\0\0"
    assert order_digest(lock, rows) == hashlib.sha256(raw).hexdigest()
    assert order_digest("cd" * 32, rows) != order_digest(lock, rows)
    assert order_digest(lock, rows[::-1]) != order_digest(lock, rows)
