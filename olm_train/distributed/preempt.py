"""Stopping before the end: a request of one rank, and the step at which all ranks act on it.

    SIGTERM | SIGUSR1 | SIGINT | time limit  --.
    stop file | tracker's button | callback  --+--> request of this rank --(all-reduce MAX, before
                                                    each step)--> the same one on every rank

The first signal only sets the flag; before the first step of a command there is nothing to save,
and it ends the process. A second one ends the process at once, with no clean-up. A
launcher forwards the signal that it got itself, so a worker may see one request twice: signals
within `debounce` seconds count as one.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist

from olm_data.errors import UsageError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the run is saved; the same command goes on from there."""
INTERRUPT_EXIT_CODE = 130
TIME_LIMIT = 128
"""Stands for a signal where the time is up; above those."""
CANCELLED = 129
"""Stands for a signal where somebody wants the run to end; above those."""
LEASE_LOST = 130
"""Stands for a signal where another run has taken the save folder over; above all of them."""
SLURM_END = "SLURM_JOB_END_TIME"
"""Set by Slurm in each job: Unix time at which it will end the job (sbatch(1))."""


def name_of(signal_number: int) -> str:
    """Return the name of a signal, or of what stands for one."""
    others = {0: "nobody", TIME_LIMIT: "the time limit", LEASE_LOST: "another run"}
    return others.get(signal_number) or signal.Signals(signal_number).name


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """What all ranks agreed to stop for.

    Attributes:
        code: a signal's number, TIME_LIMIT, CANCELLED or LEASE_LOST.
        rank: the first that asked for it.
        by: name of the signal, or who cancelled the run: "stop file", a callback's name.
        why: in words, "" where nothing was said.
    """

    code: int
    rank: int
    by: str
    why: str = ""

    @property
    def cancelled(self) -> bool:
        """Whether the run is to end, and not to be gone on with by whoever started it."""
        return self.code == CANCELLED

    def __str__(self) -> str:
        return f"{self.by} ({self.why})" if self.why else self.by


def exit_code_of(signal_number: int) -> int:
    """Return 75 (requeue), or 130 after an interrupt from the keyboard."""
    return INTERRUPT_EXIT_CODE if signal_number == signal.SIGINT else REQUEUE_EXIT_CODE


def seconds_left(limit: float | Literal["slurm"], environment: Mapping[str, str]) -> float:
    """Return the seconds that a time limit leaves; a number is taken as it is.

    Raises:
        UsageError: Slurm's own limit is asked for, and there is none in the environment.
    """
    if limit != "slurm":
        return limit
    if not environment.get(SLURM_END, "").isdigit():
        raise UsageError(
            f"there is no {SLURM_END} in the environment",
            where="trainer.time_limit",
            why="`slurm` takes the end of the job from it",
            fix="start the run in a Slurm job, or give the limit in seconds",
        )
    return int(environment[SLURM_END]) - time.time()


class Preempted(Exception):
    """The run stopped before its end and is to be gone on with; a checkpoint is on disk.

    Attributes:
        request: what it was stopped for, the highest one where ranks got several.
        step: the step at which all ranks stopped.
    """

    def __init__(self, request: StopRequest, step: int) -> None:
        self.request, self.step = request, step
        super().__init__(f"{request} at step {step}")

    @property
    def exit_code(self) -> int:
        """75 (requeue), or 130 after an interrupt from the keyboard."""
        return exit_code_of(self.request.code)


class Preemption:
    """Context manager that holds the handlers, the flag and the agreement; may be entered twice.

    Args:
        debounce: seconds within which further signals count as the first one.
        at_once: the first signal ends the process with its exit code, until this is set to False:
            for a command that has done nothing yet that it could save.

    Attributes:
        group: process group of CPU tensors for the agreement, None in a single process.
        deadline: monotonic time from which on this rank asks to stop.
        lost: whether this rank knows that the save folder was taken over.
        request: what all ranks agreed to stop for, None: nothing yet.
    """

    def __init__(self, *, debounce: float = 1.0, at_once: bool = False) -> None:
        self.debounce, self.at_once = debounce, at_once
        self.request: StopRequest | None = None
        self.group: dist.ProcessGroup | None = None
        self.deadline = math.inf
        self.lost: Callable[[], bool] = lambda: False
        self.received = 0
        self._cancelled: tuple[str, str] | None = None
        self._first_time = 0.0
        self._depth = 0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Preemption:
        if not self._depth:
            for number in SIGNALS:
                self._handlers[number] = signal.signal(number, self._handle)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.at_once:
            text = f"stopped by {name_of(number)} before the first step; nothing was lost\n"
            os.write(2, text.encode())
            os._exit(exit_code_of(number))
        if not self.received:
            self.received, self._first_time = number, now
        elif now - self._first_time > self.debounce:
            os._exit(128 + number)

    def cancel(self, by: str, why: str) -> None:
        """Ask for the end of the run; the first request of this rank counts."""
        self._cancelled = self._cancelled or (by, why)

    def take(self, other: Preemption) -> None:
        """Take over what another one was asked for by name, before it was entered."""
        self._cancelled = self._cancelled or other._cancelled

    @property
    def asked(self) -> int:
        """LEASE_LOST, CANCELLED, the signal that this rank got, TIME_LIMIT if it is up, else 0."""
        if self.lost():
            return LEASE_LOST
        if self._cancelled:
            return CANCELLED
        return self.received or (TIME_LIMIT if time.monotonic() >= self.deadline else 0)

    def limit_time(self, limit: float | Literal["slurm"] | None, margin: float) -> None:
        """Ask to stop `margin` seconds before a time limit, see `seconds_left`; None: no limit."""
        if limit is not None:
            self.deadline = time.monotonic() + seconds_left(limit, os.environ) - margin

    def ask(self) -> StopRequest | None:
        """Agree with all ranks on what some rank was asked by; the same one on every rank."""
        if self.request is None:
            asked = self.asked
            flag = torch.tensor([asked], dtype=torch.int32)
            if self.group is not None:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
            if agreed := int(flag[0]):
                self.request = self._first_of(agreed, asked)
        return self.request

    def _first_of(self, agreed: int, asked: int) -> StopRequest:
        """Return the request of the first rank that was asked by what all agreed on."""
        by, why = self._cancelled or ("", "")
        named = (by, why) if asked == CANCELLED else (name_of(asked), "")
        own = StopRequest(code=asked, rank=0, by=named[0], why=named[1])
        if self.group is None:
            return own
        requests = [own] * dist.get_world_size(self.group)
        dist.all_gather_object(requests, own, group=self.group)
        rank = next(rank for rank, each in enumerate(requests) if each.code == agreed)
        return replace(requests[rank], rank=rank)
