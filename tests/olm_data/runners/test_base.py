"""What jobs and runners agree on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.jobs import Durable

from olm_data.runners.base import Count, Deferred, whole
from olm_data.runners.local import Reporter


def test_the_columns_of_counts_stay_as_heartbeats_hold_them() -> None:
    assert [count.name for count in Count] == [
        *("DOCUMENTS", "TEXT_BYTES", "TOKENS", "DROPPED", "BAD", "READ_US", "ENCODE_US"),
        *("WRITE_US", "BY_REFERENCE", "PEAK_KIB"),
    ]


def test_a_reporter_adds_to_its_row_and_begins_anew_but_for_the_memory() -> None:
    row = np.full(len(Count), 7, np.int64)
    report = Reporter(row)
    assert row[: Count.PEAK_KIB].tolist() == [0] * Count.PEAK_KIB
    report(documents=2, tokens=5)
    report(tokens=1)
    assert (row[Count.DOCUMENTS], row[Count.TOKENS]) == (2, 6)
    assert row[Count.PEAK_KIB] > 7


def test_what_is_left_of_a_task_can_be_finished_in_place(tmp_path: Path) -> None:
    job = Durable(str(tmp_path), last=0)
    begun = job.run(0, Reporter(np.zeros(len(Count), np.int64)))
    assert isinstance(begun, Deferred)
    assert whole(begun) == 0
    assert whole(3) == 3
