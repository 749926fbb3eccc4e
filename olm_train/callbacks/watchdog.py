"""A rank that no longer moves ends, and says where it was and how far the others were.

    steps -> beat --(thread, a few times per timeout)--> store: step of each rank
                  no beat for `timeout` seconds -> steps of all ranks, all stacks -> exit code 1
                  nor can that thread run       -> all stacks (faulthandler's own thread) -> exit 1

In a collective one hung rank holds up all of them, so all of them end, within 1.25 times the
timeout.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist

from olm_data.config.hints import PositiveFloat
from olm_train.callbacks.base import Callback

PER_TIMEOUT = 8
"""How often in a timeout the thread looks."""
BACKSTOP = 1.25
"""Timeouts after which faulthandler ends a process whose interpreter is stuck."""
EXIT_CODE = 1
STDERR = 2
"""Of the process itself: sys.stderr may have been replaced by something without a number."""


@dataclass(kw_only=True)
class WatchdogCallback(Callback):
    """The end of a run that hangs.

    Runs first: what other callbacks do is watched too.

    Attributes:
        enabled: end a rank that no longer moves, with the stacks of its threads and the last step
            of each rank; false: wait for ever.
        timeout: seconds without a step, an evaluation or a finished save after which a rank ends;
            longer than the longest of them, and than compiling.
    """

    priority: ClassVar[int] = 10

    enabled: bool = True
    timeout: PositiveFloat = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last = 0.0
        self._doing = "starting"
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None

    def pre_train(self) -> None:
        self._beat("starting")
        self._stopped.clear()
        if self.trainer.world.store is not None:
            # A connection of its own: the other one may be held by what hangs.
            self._store = dist.PrefixStore("watchdog", self.trainer.world.store.clone())  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._watch, name="olm-watchdog", daemon=True)
        self._thread.start()

    def pre_step(self, batches: Sequence[Any]) -> None:
        self._beat("in the step after it")

    def post_step(self) -> None:
        self._beat("between steps")

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        self._beat("between steps")

    def post_checkpoint_saved(self, folder: str) -> None:
        self._beat("between steps")

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self, doing: str) -> None:
        self._last, self._doing = time.monotonic(), doing
        faulthandler.dump_traceback_later(self.timeout * BACKSTOP, exit=True, file=STDERR)

    def _watch(self) -> None:
        while not self._stopped.wait(self.timeout / PER_TIMEOUT):
            if self.trainer.data_loader.awaited:
                self._beat("waiting for text")
            told = f"step {self.trainer.step:,} done, {self._doing}"
            if self._store is not None:
                try:
                    self._store.set(str(self.trainer.world.rank), told)
                except dist.DistError:  # the rank that holds the store is gone; its end is told
                    self._store = None
            if time.monotonic() - self._last > self.timeout:
                self._end(told)

    def _end(self, told: str) -> None:
        world = self.trainer.world
        lines = [
            f"error: rank {world.rank} has not moved for {self.timeout:g} seconds: {told}",
            *(f"  rank {rank}: {self._told_by(rank)}" for rank in range(world.size)),
            "  why: a rank or a collective hangs; the stacks of all threads follow",
            "  fix: look for a rank behind the others; run the same command again to go on",
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os._exit(EXIT_CODE)

    def _told_by(self, rank: int) -> str:
        try:
            if self._store is not None and self._store.check([str(rank)]):
                return self._store.get(str(rank)).decode()
        except dist.DistError:
            self._store = None
        return "unknown"
