"""What the trainer asks of a data loader; `loader.DataLoader` is the one for locks.

    Trainer --iter--> this rank's list of micro-batches, a step each   (over all epochs there are)
            --step, epoch, steps-->  where it is, and how far it goes
            <--state_dict, load_state_dict--> checkpoint
            --awaited, look, follow--> text that is still being tokenised

A loader of one's own derives from `DataLoaderBase`, sets `global_batch_size`, and writes what is
abstract; it counts `step` and `epoch` before it hands out a step. What only rows of a mixture lock
can answer has a default that says so: `lock`, `rows_of_step`, `order_digest`, `skip`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import JsonObject
from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.order.steps import Range, StepSizes


class DataLoaderBase(ABC):
    """Hands out the steps of a run to one rank.

    Attributes:
        step: steps handed out so far, counted before the step is given.
        epoch: the pass over the data that the last step is of, from 1.
        epochs: passes there are; None: as many as are asked for.
        global_batch_size: what a step holds over all ranks, in `unit`.
        unit: what sizes are counted in: "tokens" or "instances".
        lock: mixture lock that the rows come from; None: from none.
    """

    step: int = 0
    epoch: int = 1
    epochs: int | None = None
    global_batch_size: int
    unit: ClassVar[str] = "instances"
    lock: Lock | None = None

    @property
    @abstractmethod
    def steps(self) -> int | None:
        """Whole steps of an epoch; None: not known before it ends."""

    @abstractmethod
    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the micro-batches of each step from `step` on, the same number on each rank.

        One iterator goes over all epochs. Where `steps` is None the run ends when the iterator of
        any rank does.
        """

    @abstractmethod
    def state_dict(self) -> JsonObject:
        """Return the state after the last step handed out: JSON values, tuples and bytes.

        It may differ between ranks; each gets its own back.
        """

    @abstractmethod
    def load_state_dict(self, state: JsonObject) -> None:
        """Continue where `state` was taken: sets `step` and `epoch`, closes a running iterator."""

    @property
    def batch_sizes(self) -> StepSizes:
        """What each step holds over all ranks, in `unit`."""
        return StepSizes.constant(self.global_batch_size)

    def schedule_sizes(self, sizes: StepSizes) -> None:
        """Give steps the sizes of a schedule, in `unit`; called before the first one.

        Raises:
            UsageError: steps cannot have other sizes; the default. Or these do not fit.
        """
        raise UsageError(
            "the steps of this data loader have one size",
            where="trainer.callbacks.batch_size_scheduler",
            fix="leave it out, or write schedule_sizes and batch_sizes of the loader",
        )

    def check_sizes(self, first: int) -> None:  # noqa: B027  # a default, and a good one
        """Refuse sizes of step `first` or later that these ranks cannot share; default: none.

        Raises:
            UsageError: which size, and the nearest that would do.
        """

    @property
    def datasets(self) -> Sequence[Dataset]:
        """Datasets of the lock's sources, in their order; none without a lock."""
        return [] if self.lock is None else self.lock.open_datasets(verify="off")

    @property
    def data_wait_seconds(self) -> float:
        """Seconds the trainer has waited for batches so far; default: not measured, 0."""
        return 0.0

    def left_over(self) -> str | None:
        """Return what at the end of the data fills no step, in words; None: nothing is known."""
        return None

    @property
    def skip(self) -> tuple[Range, ...]:
        """Ranges of global rows left out; none without a lock."""
        return ()

    def tokens_before(self, step: int) -> int:
        """Return what the first `step` steps hold over all ranks, in `unit`."""
        return self.batch_sizes.before(step)

    def rows_of_step(self, step: int) -> NDArray[np.int64]:
        """Return the global rows int64 [G] of a step, counted from 0; empty without a lock."""
        return np.empty(0, dtype=np.int64)

    def order_digest(self, step: int) -> str | None:
        """Return the digest of a step's rows, counted from 0, for the log; None without a lock."""
        return None

    @property
    def awaited(self) -> bool:
        """Whether the text of the next step is still to arrive: it is in no shard; default: no.

        The same on every rank.
        """
        return False

    def look(self) -> tuple[bytes | None, str | None]:
        """Look for it once, on one rank: what `follow` takes, and a line to say; or wait a bit.

        Raises:
            InputError: nobody is at work on it.
            UsageError: there is no more text, and too little for the run.
        """
        return None, None

    def follow(self, lock: bytes) -> None:  # noqa: B027  # a default, and a good one
        """Go on with the text that `look` has found, on every rank."""

    def leave_out(self, rows: Iterable[Range]) -> None:
        """Leave ranges of global rows out from here on.

        Raises:
            UsageError: there are no rows, without a lock.
        """
        raise UsageError(
            "rows can be left out of a mixture lock alone",
            why="the data of this run come from no lock",
        )

    def ready(self, seconds: float) -> bool:
        """Wait up to `seconds` for the next step; default: True, it is made when it is asked for.

        True also where only asking for it will tell, such as at the end of the data.
        """
        return True

    def close(self) -> None:  # noqa: B027  # a default, and a good one
        """Stop what runs in the background; the loader can be iterated again. Default: nothing."""


def require_lock(loader: DataLoaderBase, what: str) -> Lock:
    """Return the lock of a loader.

    Args:
        what: needs it, such as "the callback lm_evaluator".

    Raises:
        UsageError: its data come from no lock.
    """
    if loader.lock is not None:
        return loader.lock
    raise UsageError(
        f"{what} needs a mixture lock, and the data of this run come from none",
        why="which tokenizer, rows and documents they are is known from a lock alone",
        fix=f"leave {what} out, or train on a lock: olm_train.DataLoader('mixture.lock.json', ...)",
    )
