"""When shards are needed next, and which to give up for room. Pure.

    (step, shard) of all known uses -> NextUses.next_use(shard, step), .in_order(step)
    sizes, next uses, room wanted      -> victims: furthest next use first, never again before that

L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: giving up what
is needed furthest in the future misses least.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
NEVER = 1 << 62
"""The next use of what has no known use."""


class NextUses:
    """The uses of shards in the steps that are known.

    Args:
        steps: integers [m], the step of each use.
        shards: integers [m], the shard that is used; a pair may be repeated.
    """

    def __init__(self, steps: Any = (), shards: Any = ()) -> None:
        pairs = np.stack([np.asarray(shards, np.int64), np.asarray(steps, np.int64)])
        pairs = np.unique(pairs, axis=1)  # by shard, then by step
        known, first = np.unique(pairs[0], return_index=True)
        parts = np.split(pairs[1], first[1:]) if len(known) else []
        self._steps: dict[int, Int64] = dict(zip(known.tolist(), parts, strict=True))

    def next_use(self, shard: int, step: int) -> int:
        """Return the first step from `step` on that uses a shard, or `NEVER`."""
        steps = self._steps.get(shard)
        if steps is None or steps[-1] < step:
            return NEVER
        return int(steps[np.searchsorted(steps, step)])

    def in_order(self, step: int) -> list[int]:
        """Return the shards used from `step` on, the one that is needed first first."""
        uses = [(self.next_use(shard, step), shard) for shard in self._steps]
        return [shard for use, shard in sorted(uses) if use != NEVER]


def victims(
    sizes: Mapping[str, int], next_use: Mapping[str, int], room: int, later_than: int
) -> list[str] | None:
    """Choose what to give up for `room` bytes.

    Args:
        sizes: bytes of each thing there is.
        next_use: step at which it is needed next; what is missing here is never needed.
        room: bytes wanted; nothing is given up for 0 or less.
        later_than: only what is needed after this step may go.

    Returns:
        Names, the furthest next use first; None where not enough may go.
    """
    chosen: list[str] = []
    for name in sorted(sizes, key=lambda name: (-next_use.get(name, NEVER), name)):
        if room <= 0:
            break
        if next_use.get(name, NEVER) <= later_than:
            return None
        chosen.append(name)
        room -= sizes[name]
    return chosen if room <= 0 else None
