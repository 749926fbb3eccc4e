"""What callbacks use of a run besides its steps: words, metrics, and a way to end it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from olm_data.errors import UsageError, shown
from olm_train.callbacks.base import Callback
from olm_train.callbacks.group import Callbacks
from olm_train.callbacks.notice import Event
from olm_train.distributed.preempt import Preemption
from olm_train.distributed.stop_file import StopFile
from olm_train.distributed.world import World
from olm_train.metrics import MetricsBuffer, Reduce


class RunServices:
    """The base of the `Trainer`, which owns the steps.

    Args:
        world: the ranks of the run.
        work_dir: local folder of its logs, and of its stop file.
    """

    callbacks: Callbacks

    def __init__(self, world: World, work_dir: Path) -> None:
        self.world, self.work_dir = world, work_dir
        self.paused_seconds = 0.0
        self._preemption = Preemption()
        self._stop_file = StopFile(work_dir)
        self._buffer = MetricsBuffer(world)
        self._metrics_step = 1  # that of what callbacks record
        self._blocking: set[int] = set()  # callbacks that let no ephemeral checkpoint be saved
        self._fitting = False

    def add_callback(self, name: str, callback: Callback) -> None:
        """Attach a callback, before `fit`.

        Raises:
            UsageError: there is one of that name, or the run has begun.
        """
        if self._fitting:
            raise UsageError(
                f"the callback {name!r} comes too late: the run has begun",
                fix="add it before fit()",
            )
        self.callbacks.add(name, callback)

    def ask_to_stop(self) -> bool:
        """Agree with all ranks whether to stop; for long work outside the steps."""
        if self.world.main and (why := self._stop_file.found()) is not None:
            self._preemption.cancel("stop file", why)
        return self._preemption.ask() is not None

    def cancel_run(self, reason: str, *, by: str = "cancel_run") -> None:
        """End the run before its next step, on all ranks, with a checkpoint; any rank may ask.

        Args:
            reason: why, for the log.
            by: who asks, such as a callback's name.
        """
        self._preemption.cancel(by, reason)

    def record_metric(
        self, name: str, value: Tensor | float, *, reduce: Reduce | None = None
    ) -> None:
        """Add a metric to those of a step, to be logged with them.

        That is the step being taken, in `post_step` the one just taken, and the next one where
        those were logged already.

        Args:
            name: in the log; that of a metric of the step itself replaces it.
            value: a number, or a tensor of one element, which is not read before the others are. A
                DTensor, such as the norm of a sharded gradient, is recorded on every rank.
            reduce: over the ranks that recorded it; None: what rank 0 recorded.
        """
        self._buffer.record_one(self._metrics_step, name, value, reduce)

    def block_ephemeral_checkpoints(self, by: object) -> None:
        """See `Callback.block_ephemeral_checkpoints`."""
        self._blocking.add(id(by))

    def unblock_ephemeral_checkpoints(self, by: object) -> None:
        """See `Callback.unblock_ephemeral_checkpoints`."""
        self._blocking.discard(id(by))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around work that is no training, so that throughput leaves it out."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.paused_seconds += time.monotonic() - start

    def tell(self, event: Event, step: int, text: str) -> None:
        """Hand an event of the run to the callbacks, see `Callback.on_event`; from any thread."""
        self.callbacks.call("on_event", event, step, text)

    def say(self, message: str) -> None:
        """Print a line to stderr, on rank 0; names in it act on no terminal."""
        if self.world.main:
            print(shown(message), file=sys.stderr, flush=True)
