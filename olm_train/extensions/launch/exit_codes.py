"""What each exit code of a run means for whoever started it: the contract, in one place.

code of the first rank that failed, was a step gained? -> again | the same code, for good
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from olm_train.distributed.preempt import INTERRUPT_EXIT_CODE, REQUEUE_EXIT_CODE


class Retry(StrEnum):
    """Whether a job is started again.

    Attributes:
        done: it is finished.
        always: it is saved, and the same command goes on.
        gained: if this start saved a later step than the one before it: else it would fail there
            again.
        never: it would only fail again.
    """

    done = "done"
    always = "always"
    gained = "gained"
    never = "never"


class Meaning(NamedTuple):
    """What a code says, and what follows."""

    what: str
    retry: Retry


CONTRACT = {
    0: Meaning("finished", Retry.done),
    1: Meaning("unexpected error, or a loss that is not finite", Retry.gained),
    2: Meaning("usage: an option, a configuration", Retry.never),
    3: Meaning("validation: bytes are not what their digest says", Retry.never),
    4: Meaning("input refused", Retry.never),
    5: Meaning("local resource: disk, memory, a lost rank", Retry.gained),
    6: Meaning("remote storage", Retry.gained),
    7: Meaning("conflict: another run writes there", Retry.never),
    REQUEUE_EXIT_CODE: Meaning("stopped after saving: signal, time limit", Retry.always),
    INTERRUPT_EXIT_CODE: Meaning("interrupted from the keyboard", Retry.never),
}
"""By exit code. One that is not here, such as 137 (SIGKILL), is retried if a step was gained."""

LOST_RANK = 5
"""What ranks end with that lose another one: not the first cause, where there is another code."""
FINAL = [code for code in CONTRACT if code not in (0, REQUEUE_EXIT_CODE)]
"""What an agent ends with where the job is not to be started again."""


def exit_code(returncode: int) -> int:
    """Return a process's exit code as a shell gives it: 128 + N where signal N ended it."""
    return returncode if returncode >= 0 else 128 - returncode


def first(failed: Mapping[int, int]) -> int:
    """Return which of several ranks, seen to have failed at the same time, is the cause.

    Args:
        failed: code by rank.
    """
    return min(failed, key=lambda rank: failed[rank] == LOST_RANK)


def ends_with(code: int, *, gained: bool) -> int:
    """Return what the agents of a job end with: 75 if it is to be started again, else `code`.

    Args:
        code: of the rank that failed first.
        gained: whether a later step was saved than before this start.
    """
    retry = CONTRACT[code].retry if code in CONTRACT else Retry.gained
    return REQUEUE_EXIT_CODE if retry == Retry.gained and gained else code
