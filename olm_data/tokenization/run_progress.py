"""From the counts that workers share to what people see: speed now, stages, workers, time left.

plan's sizes + counts [tasks, Count] + running tasks -> Progress.update(share, numbers, facts)
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from olm_data.counts import counted, duration, scaled
from olm_data.pace import Window, forecast
from olm_data.progress import Progress
from olm_data.runners.base import Count

STALL_SECONDS = 15.0
STAGES = {"read": Count.READ_US, "encode": Count.ENCODE_US, "write": Count.WRITE_US}


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has done so far: keys of the event `progress`.

    Attributes:
        dropped, bad: records dropped, and of these the ones that count against `--max-bad`.
        stages: share of each stage in the time all were at work; {} before any was.
        workers: tasks at work.
    """

    documents: int
    text_bytes: int
    tokens: int
    dropped: int
    bad: int
    text_bytes_per_second: int
    tokens_per_second: int
    stages: dict[str, float]
    workers: int
    shards: int
    shards_done: int


class RunProgress:
    """Follows one `Runner.run`.

    Args:
        progress: where to show it; entered by the caller.
        planned: int64 [tasks], guessed bytes of text of each task.
        todo: the tasks to run; the others are done already and count for nothing here.
    """

    def __init__(self, progress: Progress, planned: Sequence[int], todo: Sequence[int]) -> None:
        self._progress, self._todo = progress, np.asarray(todo, np.int64)
        self._planned = np.asarray(planned, np.int64)
        self._finished = np.zeros(len(self._planned), bool)
        self._bytes, self._tokens = Window(), Window()
        self.counts = np.zeros((len(self._planned), len(Count)), np.int64)
        self.share = 0.0  # of the work of `todo` that is done

    def done(self, task: int) -> None:
        """Note that a task is finished."""
        self._finished[task] = True

    def watch(self, counts: np.ndarray, running: Sequence[int]) -> None:
        """Show the counts. See `runners.base.Watch`."""
        self.counts[:] = counts
        sums, now = counts.sum(axis=0), self._progress.seconds
        self._bytes.add(now, int(sums[Count.TEXT_BYTES]))
        self._tokens.add(now, int(sums[Count.TOKENS]))
        todo = self._todo
        done, left = forecast(
            self._planned[todo], self._finished[todo], counts[todo, Count.TEXT_BYTES]
        )
        speed = self._bytes.rate
        in_bytes = bool(sums[Count.TEXT_BYTES])
        facts = self._facts(sums, speed, len(running))
        self.share = done / max(done + left, 1.0)
        self._progress.update(
            self.share,
            in_words(facts, still=self._bytes.still),
            left=left / speed if speed and in_bytes else None,
            facts=facts,
        )

    def _facts(self, sums: np.ndarray, speed: float, workers: int) -> RunFacts:
        return RunFacts(
            documents=int(sums[Count.DOCUMENTS]),
            text_bytes=int(sums[Count.TEXT_BYTES]),
            tokens=int(sums[Count.TOKENS]),
            dropped=int(sums[Count.DROPPED]),
            bad=int(sums[Count.BAD]),
            text_bytes_per_second=round(speed),
            tokens_per_second=round(self._tokens.rate),
            stages=stage_shares(sums),
            workers=workers,
            shards=len(self._todo),
            shards_done=int(self._finished.sum()),
        )


def stage_shares(sums: np.ndarray) -> dict[str, float]:
    """Return the share of each stage in the time all stages were at work; {} before any was.

    Args:
        sums: int64 [len(Count)], counts summed over tasks.
    """
    spent = {name: int(sums[column]) for name, column in STAGES.items()}
    total = sum(spent.values())
    return {name: round(us / total, 4) for name, us in spent.items()} if total else {}


def in_words(facts: RunFacts, *, still: float = 0.0) -> list[str]:
    """Return the facts of a run as pieces of text, the most important first.

    Args:
        still: seconds since text last came through; said when it is long.
    """
    pieces = [
        f"{facts.text_bytes_per_second / 1e6:.1f} MB/s of text",
        f"{scaled(facts.tokens_per_second)} tokens/s",
        f"{counted(facts.documents, 'document')}",
    ]
    if not facts.text_bytes:  # no speed yet, and none to be shown as a slow one
        pieces = ["starting"]
    if still >= STALL_SECONDS:
        pieces.insert(0, f"no text for {duration(still)}")
    if facts.dropped:
        bad = f" ({facts.bad:,} bad)" if facts.bad else ""
        pieces.append(f"{facts.dropped:,} dropped{bad}")
    pieces.append(f"{facts.shards_done:,} of {counted(facts.shards, 'shard')}")
    if facts.stages:
        pieces.append(" ".join(f"{name} {part:.0%}" for name, part in facts.stages.items()))
    pieces.append(counted(facts.workers, "worker"))
    return pieces
