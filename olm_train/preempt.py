"""Preemption: a signal becomes a flag, and all ranks agree on the step at which they act on it.

    SIGTERM | SIGUSR1 | SIGINT -> flag of this rank --(all-reduce MAX, once a step)--> same answer
                                                                                       everywhere

The first signal only sets the flag. A second one ends the process at once, with no clean-up. A
launcher forwards the signal that it got itself, so a worker may see one request twice: signals
within `debounce` seconds count as one.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the run is saved; the same command goes on from there."""
INTERRUPT_EXIT_CODE = 130


class Preempted(Exception):
    """The run stopped before its end because a signal asked for it; a checkpoint is on disk.

    Attributes:
        signal_number: the signal, the highest one where ranks got several.
        step: the step at which all ranks stopped.
    """

    def __init__(self, signal_number: int, step: int) -> None:
        self.signal_number, self.step = signal_number, step
        super().__init__(f"{signal.Signals(signal_number).name} at step {step}")

    @property
    def exit_code(self) -> int:
        """75 (requeue) after SIGTERM and SIGUSR1, 130 after an interrupt from the keyboard."""
        if self.signal_number == signal.SIGINT:
            return INTERRUPT_EXIT_CODE
        return REQUEUE_EXIT_CODE


class Preemption:
    """Context manager that holds the handlers, the flag and the agreement.

    Args:
        group: process group of CPU tensors for the agreement, None in a single process. It must
            carry no other traffic, since the all-reduce runs beside the training step.
        debounce: seconds within which further signals count as the first one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, debounce: float = 1.0) -> None:
        self.group, self.debounce = group, debounce
        self.received = 0
        self._first_time = 0.0
        self._handlers: dict[signal.Signals, Any] = {}
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def __enter__(self) -> Preemption:
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._first_time = number, now
        elif now - self._first_time > self.debounce:
            os._exit(128 + number)

    def begin(self) -> None:
        """Start the agreement for this step; a signal that comes later counts for the next one."""
        self._flag[0] = self.received
        if self.group is not None:
            self._work = dist.all_reduce(
                self._flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True
            )

    def agreed(self) -> int:
        """Finish what `begin` started: the signal some rank got, 0 if none; equal on all ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._flag[0])

    def ask(self) -> int:
        """Agree now; for places outside the training step, such as an evaluation."""
        self.begin()
        return self.agreed()
