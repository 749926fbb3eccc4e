"""Row 49: for any sizes, seeds and stages, every row of a source is drawn exactly once an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.order.schedule import Schedule, ScheduleStage


def assert_each_row_once_an_epoch(schedule: Schedule) -> None:
    place = schedule.locate(np.arange(schedule.total_rows))
    for source, size in enumerate(schedule.source_rows.tolist()):
        here = place.source == source
        epochs, rows = place.epoch[here], place.row[here]
        drawn = len(rows)
        assert np.array_equal(epochs, np.arange(drawn) // size)  # epochs follow each other
        seen = np.bincount(rows, minlength=size)
        assert len(seen) == size
        assert seen.min() >= drawn // size
        assert seen.max() <= -(-drawn // size)
        assert len(np.unique(epochs * size + rows)) == drawn  # never twice in an epoch


@pytest.mark.parametrize("seed", [0, 20260101, 2**63 - 1])
def test_every_row_once_an_epoch_for_all_small_sizes_at_once(seed: int) -> None:
    sources = [(f"source-{n}", n) for n in range(1, 129)]
    rounds = [ScheduleStage(3000, (1,) * 128), ScheduleStage(40_000, tuple(range(1, 129)))]
    assert_each_row_once_an_epoch(Schedule(seed, sources, rounds))


@given(
    sizes=st.lists(st.integers(1, 200), min_size=3, max_size=3),
    stages=st.lists(
        st.tuples(st.integers(0, 500), st.tuples(*[st.integers(0, 20)] * 3).filter(any)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_row_once_an_epoch_for_any_stages(
    sizes: list[int], stages: list[tuple[int, tuple[int, ...]]], seed: int
) -> None:
    sources = [(f"source-{i}", n) for i, n in enumerate(sizes)]
    assert_each_row_once_an_epoch(
        Schedule(seed, sources, [ScheduleStage(*stage) for stage in stages])
    )


def test_two_ranks_of_any_batch_size_cover_the_run_without_overlap() -> None:
    schedule = Schedule(5, [("a", 100), ("b", 37)], [ScheduleStage(480, (2, 1))])
    whole = schedule.locate(np.arange(480))
    for world, batch in ((1, 16), (2, 8), (3, 24), (4, 48), (16, 32)):
        seen = []
        for start in range(0, 480, batch):
            rows = np.arange(start, min(start + batch, 480))
            for part in np.array_split(rows, world):
                place = schedule.locate(part)
                seen += list(
                    zip(
                        place.source.tolist(), place.epoch.tolist(), place.row.tolist(), strict=True
                    )
                )
        expected = zip(whole.source.tolist(), whole.epoch.tolist(), whole.row.tolist(), strict=True)
        assert seen == list(expected)
