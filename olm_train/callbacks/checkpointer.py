"""Saves checkpoints at intervals and at the end, and removes those that may go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.retention import Removal, removable, remove_checkpoint


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig:
    """When checkpoints are written and how long they stay.

    Attributes:
        enabled: false: no checkpoint is ever written, not even on preemption.
        save_interval: steps between permanent checkpoints.
        ephemeral_save_interval: steps between checkpoints that stay until the next one; null: none.
        remove: `ephemeral_only`, `all_non_permanent` or `never`.
    """

    enabled: bool = True
    save_interval: int = 250
    ephemeral_save_interval: int | None = None
    remove: Removal = Removal.ephemeral_only

    def __post_init__(self) -> None:
        if self.save_interval < 1:
            raise UsageError(f"save_interval is at least 1, not {self.save_interval}")
        if self.ephemeral_save_interval is not None and not (
            1 <= self.ephemeral_save_interval < self.save_interval
        ):
            raise UsageError(
                f"ephemeral_save_interval {self.ephemeral_save_interval} is not between 1 and "
                f"save_interval {self.save_interval}",
                fix="ephemeral checkpoints are the frequent ones",
            )

    def build(self) -> CheckpointerCallback:
        """Return the callback."""
        return CheckpointerCallback(self)


class CheckpointerCallback(Callback):
    """See `CheckpointerConfig`. Runs after the evaluator: a checkpoint knows its results."""

    priority: ClassVar[int] = 1
    saves_checkpoints: ClassVar[bool] = True

    def __init__(self, config: CheckpointerConfig) -> None:
        self.config = config

    def post_step(self) -> None:
        step, ephemeral = self.trainer.step, self.config.ephemeral_save_interval
        if step % self.config.save_interval == 0:
            self.trainer.save_checkpoint(Kind.permanent)
        elif ephemeral is not None and step % ephemeral == 0 and step < self.trainer.stop_step:
            self.trainer.save_checkpoint(Kind.ephemeral)

    def post_checkpoint_saved(self, folder: Path) -> None:
        known, newest = self.trainer.checkpoints, self.trainer.step
        for step in removable(known, newest, self.config.remove):
            if self.trainer.main:
                remove_checkpoint(self.trainer.save_folder, step)
            del known[step]

    def post_train(self) -> None:
        self.trainer.save_checkpoint(Kind.final)
