"""What the steps of a trace were spent on, as a Markdown table. Pure: spans of time in, text out.

step  [-----------------------------------------]
compute         ####  ########        ###            kernels and copies; on a CPU operators
communication       ####   ----          ##          `----`: hidden, as something is computed
data wait                         ####               of what is left
idle                                       ####      the rest
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from olm_train.callbacks.base import DATA_WAIT

Span = tuple[int, int]
"""First and last nanosecond."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION = ("nccl", "gloo", "c10d")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of a trace: its name, what kind kineto calls it, and when it was."""

    name: str
    kind: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What one step was spent on, in nanoseconds; all but `hidden` add up to `total`.

    Attributes:
        total: from its beginning to that of the next.
        compute, communication, data_wait, idle: see the module; `communication` is what nothing
            hides.
        hidden: communication while something is computed.
    """

    total: int
    compute: int
    communication: int
    data_wait: int
    idle: int
    hidden: int


def step_times(step: Span, events: Iterable[Event], *, on_device: bool) -> StepTimes:
    """Return what a step was spent on.

    Args:
        step: when it was.
        events: of the trace; those of other steps count for nothing.
        on_device: the step runs on a GPU: what the CPU does meanwhile is neither compute nor
            communication.
    """
    compute: list[Span] = []
    communication: list[Span] = []
    waits: list[Span] = []
    for event in events:
        span = (max(event.start, step[0]), min(event.stop, step[1]))
        if span[0] >= span[1]:
            continue
        if event.kind == "user_annotation" and event.name == DATA_WAIT:
            waits.append(span)
        elif event.kind in (_ON_DEVICE if on_device else ("cpu_op",)):
            exchanged = event.name.lower().startswith(_COMMUNICATION)
            (communication if exchanged else compute).append(span)
    total = step[1] - step[0]
    computing, exchanging = union(compute), union(communication)
    busy = union([*computing, *exchanging])
    everything = length(union([*busy, *waits]))
    return StepTimes(
        total=total,
        compute=length(computing),
        communication=length(busy) - length(computing),
        data_wait=everything - length(busy),
        idle=total - everything,
        hidden=length(computing) + length(exchanging) - length(busy),
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the spans without overlap, in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[Span]) -> int:
    """Return the nanoseconds of spans that do not overlap."""
    return sum(stop - start for start, stop in spans)


def table(steps: Sequence[tuple[int, StepTimes]], title: str) -> str:
    """Return the times of steps, by number, in milliseconds, and each part's share of the whole."""
    names = ("compute", "communication", "data wait", "idle")
    lines = [
        f"# {title}",
        "",
        "Milliseconds. Communication is what no computation hides; hidden is the rest of it.",
        "",
        f"| step | total | {' | '.join(names)} | hidden communication |",
        "|" + "---:|" * 7,
    ]
    parts = [(n, (t.total, t.compute, t.communication, t.data_wait, t.idle, t.hidden))
             for n, t in steps]  # fmt: skip
    for number, values in parts:
        shown = " | ".join(f"{value / 1e6:,.2f}" for value in values)
        lines.append(f"| {number:,} | {shown} |")
    sums = [sum(column) for column in zip(*(values for _, values in parts), strict=True)]
    if sums and sums[0]:
        shares = " | ".join(f"{value / sums[0]:.1%}" for value in sums)
        lines.append(f"| share | {shares} |")
    return "\n".join(lines) + "\n"
