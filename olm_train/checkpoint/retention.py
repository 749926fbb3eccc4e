"""Which checkpoints may go: a pure rule, and a removal that a kill cannot turn into a torn one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from olm_train.checkpoint.manifest import PARTIAL_SUFFIX, Kind, folder_name, partial_folders


class Removal(StrEnum):
    """What is removed after a new checkpoint is complete."""

    ephemeral_only = "ephemeral_only"
    """Only those saved at `ephemeral_save_interval` or on preemption."""
    all_non_permanent = "all_non_permanent"
    """Everything not saved at `save_interval`, also the last one of an earlier, shorter run."""
    never = "never"
    """Nothing."""


def removable(known: Mapping[int, Kind], newest_good: int, remove: Removal) -> list[int]:
    """Return the steps whose checkpoints may be removed, oldest first.

    Args:
        known: kind of each complete checkpoint by step.
        newest_good: step of the newest checkpoint known to be complete; it always stays.
        remove: the user's rule.
    """
    kinds = {
        Removal.ephemeral_only: {Kind.ephemeral},
        Removal.all_non_permanent: {Kind.ephemeral, Kind.final},
        Removal.never: set(),
    }[remove]
    return sorted(step for step, kind in known.items() if step < newest_good and kind in kinds)


def remove_checkpoint(save_folder: Path, step: int) -> None:
    """Remove a checkpoint; it stops being one before its first file goes."""
    folder = save_folder / folder_name(step)
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    os.rename(folder, partial)
    shutil.rmtree(partial)


def remove_partial(save_folder: Path) -> list[str]:
    """Remove what killed saves and removals left; return the names."""
    found = partial_folders(save_folder)
    for folder in found:
        shutil.rmtree(folder)
    return [folder.name for folder in found]
