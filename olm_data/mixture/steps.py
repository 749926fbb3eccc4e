"""Which rows a step, a rank and a micro-batch are made of, and back. Pure.

    step -> kept rows [step * G, (step + 1) * G) -> rank r: the r-th of W equal slices
                                                 -> micro-batches of b rows, one after another

G, W and b decide who reads when, never what stands where in the order. Steps count from 0 here;
logs and commands count them from 1. Never: files, or which documents a row holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olm_data.errors import UsageError
from olm_data.mixture.skip import KeptRows

SKIPPED, LEFT_OVER = -1, -2
"""Instead of a step: the row is skipped, or at the end of the schedule in no whole step."""


def order_digest(lock_digest: str, rows: NDArray[np.int64]) -> str:
    """Return the digest that a run logs for a step.

    The sha256 of the lock's digest (its 64 hexadecimal digits) and of the step's global rows over
    all ranks, in order, as little-endian int64. It depends on the lock, the global batch size and
    the skipped rows alone.
    """
    return hashlib.sha256(lock_digest.encode() + rows.astype("<i8").tobytes()).hexdigest()


class Steps:
    """The steps of a schedule.

    Args:
        total_rows: rows of the schedule.
        step_rows: G, rows of a step over all ranks.
        skip: half-open ranges of global rows that are left out.

    Attributes:
        count: whole steps.
        kept: the rows that are not skipped.

    Raises:
        UsageError: a step has no rows, or a skipped range is malformed.
    """

    def __init__(self, total_rows: int, step_rows: int, skip: Iterable[Sequence[int]] = ()) -> None:
        if step_rows < 1:
            raise UsageError(f"a step of {step_rows} rows", fix="give a step one row or more")
        self.kept, self.step_rows = KeptRows(total_rows, skip), step_rows
        self.count = self.kept.count // step_rows

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the global rows int64 [G] of a step, in order.

        Raises:
            UsageError: there is no such step.
        """
        if not 0 <= step < self.count:
            raise UsageError(
                f"there is no step {step + 1:,}",
                fix=f"steps of {self.step_rows:,} rows are numbered from 1 to {self.count:,}"
                if self.count
                else f"the schedule has {self.kept.count:,} rows, fewer than a step's "
                f"{self.step_rows:,}",
            )
        first = step * self.step_rows
        return self.kept.rows(np.arange(first, first + self.step_rows, dtype=np.int64))

    def step_of(self, rows: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the step int64 [m] of global rows [m], and the place int64 [m] of each in it.

        The step is `SKIPPED` or `LEFT_OVER` for a row that no step has.
        """
        index = self.kept.index(np.asarray(rows, dtype=np.int64))
        step, place = np.divmod(index, self.step_rows)
        step[step >= self.count] = LEFT_OVER
        step[index < 0] = SKIPPED
        return step, place


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the rows of a step are dealt out.

    Args:
        step_rows: G, rows of a step.
        world_size: W, ranks.
        microbatch_rows: b, rows of one micro-batch of one rank; None: all the rank has.

    Raises:
        UsageError: the step does not divide so.
    """

    step_rows: int
    world_size: int
    microbatch_rows: int | None = None

    def __post_init__(self) -> None:
        unit = self.world_size * (self.microbatch_rows or 1)
        if self.step_rows % unit:
            raise UsageError(
                f"a step of {self.step_rows:,} rows does not divide into {self.world_size:,} ranks"
                + (
                    f" and micro-batches of {self.microbatch_rows:,}"
                    if self.microbatch_rows
                    else ""
                ),
                fix="give the world size and the micro-batch of the run",
            )

    def rank_of(self, place: int) -> tuple[int, int]:
        """Return (rank, micro-batch of that rank, from 0) that has row `place` of a step."""
        rank, inside = divmod(place, self.step_rows // self.world_size)
        return rank, inside // (self.microbatch_rows or self.step_rows)

    def places(self, rank: int, microbatch: int | None) -> range:
        """Return the places in a step of one rank's rows, or of one micro-batch of them.

        Raises:
            UsageError: there is no such rank or micro-batch.
        """
        mine = self.step_rows // self.world_size
        size = self.microbatch_rows or mine
        for name, number, count in (
            ("rank", rank, self.world_size),
            ("micro-batch", microbatch or 0, mine // size),
        ):
            if not 0 <= number < count:
                raise UsageError(
                    f"there is no {name} {number}", fix=f"they are numbered from 0 to {count - 1:,}"
                )
        if microbatch is None:
            return range(rank * mine, (rank + 1) * mine)
        return range(rank * mine + microbatch * size, rank * mine + (microbatch + 1) * size)


def rows_of_tokens(name: str, tokens: int, length: int) -> int:
    """Return a size in rows that is given in tokens, under the name of its option.

    Raises:
        UsageError: it is no multiple of the sequence length.
    """
    if tokens < length or tokens % length:
        low = tokens // length * length
        near = " or ".join(f"{v:,}" for v in (low, low + length) if v)
        raise UsageError(
            f"{name} is {tokens:,} tokens, which is no multiple of the sequence length {length:,}",
            fix=f"set {name} to {near}",
        )
    return tokens // length
