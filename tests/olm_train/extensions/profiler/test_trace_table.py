from __future__ import annotations

import pytest

from olm_train.callbacks.base import DATA_WAIT
from olm_train.extensions.profiler.profiler import StepTimes, TraceEvent, step_times, table, union

GPU = [
    TraceEvent(name="gemm", kind="kernel", start=0, stop=40),
    TraceEvent(name="Memcpy HtoD", kind="gpu_memcpy", start=35, stop=50),
    TraceEvent(name="ncclDevKernel_AllGather", kind="kernel", start=30, stop=70),
    TraceEvent(name=DATA_WAIT, kind="user_annotation", start=60, stop=80),
    TraceEvent(name="aten::mm", kind="cpu_op", start=0, stop=100),
]
CPU = [
    TraceEvent(name="aten::mm", kind="cpu_op", start=10, stop=40),
    TraceEvent(name="aten::t", kind="cpu_op", start=12, stop=14),  # within the other
    TraceEvent(name="gloo:all_reduce", kind="cpu_op", start=30, stop=60),
    TraceEvent(name=DATA_WAIT, kind="user_annotation", start=90, stop=130),  # and of the next step
    TraceEvent(name="ProfilerStep#3", kind="user_annotation", start=0, stop=100),
]


@pytest.mark.parametrize(
    ("events", "on_device", "wanted"),
    [
        (GPU, True, (100, 50, 20, 10, 20, 20)),
        (CPU, False, (100, 30, 20, 10, 40, 10)),
        ([], True, (100, 0, 0, 0, 100, 0)),
    ],
)
def test_the_parts_of_a_step_add_up_to_it(
    events: list[TraceEvent], on_device: bool, wanted: tuple[int, ...]
) -> None:
    found = step_times((0, 100), events, on_device=on_device)
    assert found == StepTimes(
        total=wanted[0],
        compute=wanted[1],
        communication=wanted[2],
        data_wait=wanted[3],
        idle=wanted[4],
        hidden=wanted[5],
    )
    assert found.compute + found.communication + found.data_wait + found.idle == found.total


def test_spans_that_touch_are_one() -> None:
    assert union([(5, 9), (0, 2), (2, 3), (6, 7)]) == [(0, 3), (5, 9)]


def test_the_table_has_a_row_a_step_and_shares() -> None:
    times = StepTimes(
        total=2_000_000,
        compute=1_000_000,
        communication=500_000,
        data_wait=500_000,
        idle=0,
        hidden=250_000,
    )
    lines = table([(7, times), (8, times)], "Steps 7 to 8").splitlines()
    assert lines[0] == "# Steps 7 to 8"
    assert lines[4].startswith("| step | total | compute | communication | data wait | idle |")
    assert lines[6] == "| 7 | 2.00 | 1.00 | 0.50 | 0.50 | 0.00 | 0.25 |"
    assert lines[8] == "| share | 100.0% | 50.0% | 25.0% | 25.0% | 0.0% | 12.5% |"
