"""The next step of a data loader, agreed by the ranks where its length is not known.

    iterator -> batches on every rank | None on every rank: the data have ended

Never: a step that some ranks have and others have not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from olm_data.errors import InputError, ValidationError
from olm_train.data.base import DataLoaderBase
from olm_train.distributed.world import World


def draw(
    steps: Iterator[list[Any]],
    loader: DataLoaderBase,
    world: World,
    *,
    reached: int,
    say: Callable[[str], None],
) -> list[Any] | None:
    """Return this rank's micro-batches of the next step; every rank calls it.

    Args:
        steps: of the loader.
        reached: steps done.
        say: is told where the data have ended.

    Returns:
        None: they have, on some rank at least.

    Raises:
        ValidationError: they have, and the loader said that there are more steps.
        InputError: there was no step at all.
    """
    batches = next(steps, None)
    if loader.steps is not None:
        if batches is None:
            raise ValidationError(
                f"the data loader ended after {reached:,} steps",
                where=type(loader).__name__,
                why=f"it says that an epoch has {loader.steps:,}, and one iterator goes over all "
                "epochs",
                fix="correct its `steps`, or let `__iter__` begin the next epoch",
            )
        return batches
    if not world.any(batches is None):
        return batches
    more = [str(rank) for rank, left in enumerate(world.gather(batches is not None)) if left]
    rest = f"; a step that the ranks {', '.join(more)} still had is left out" if more else ""
    if not reached:
        raise InputError(
            "the data loader gave nothing to train on",
            where=type(loader).__name__,
            why=f"it ended before the first step{rest}",
        )
    say(f"the data ended after step {reached:,}{rest}")
    return None
