"""Which checkpoints may go: a pure rule over their kinds."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from olm_train.checkpoint.manifest import Kind


class Removal(StrEnum):
    """What is removed after a new checkpoint is complete and verifies."""

    ephemeral_only = "ephemeral_only"
    """Only those saved at `ephemeral_save_interval` or on preemption."""
    all_non_permanent = "all_non_permanent"
    """Everything not saved at an interval or a fixed step, also the end of an earlier, shorter
    run."""
    never = "never"
    """Nothing, whatever `max_checkpoints` says."""


def removable(
    known: Mapping[int, Kind], newest_good: int, remove: Removal, keep: int | None = None
) -> list[int]:
    """Return the steps whose checkpoints may be removed, oldest first.

    Args:
        known: kind of each complete checkpoint by step.
        newest_good: step of the newest checkpoint known to be complete; it always stays, and so
            does everything newer.
        remove: the user's rule.
        keep: so many of the newest permanent ones stay; None: all of them.
    """
    if remove is Removal.never:
        return []
    kinds = {
        Removal.ephemeral_only: {Kind.ephemeral},
        Removal.all_non_permanent: {Kind.ephemeral, Kind.final},
    }[remove]
    gone = {step for step, kind in known.items() if kind in kinds}
    if keep is not None:
        permanent = sorted(step for step, kind in known.items() if kind is Kind.permanent)
        gone |= set(permanent[: max(0, len(permanent) - keep)])
    return sorted(step for step in gone if step < newest_good)
