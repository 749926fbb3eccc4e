"""Saves checkpoints at intervals, at given steps, on request and at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.retention import Removal
from olm_train.checkpoint.saver import SavePolicy, Saver


@dataclass(kw_only=True)
class CheckpointerCallback(Callback):
    """When checkpoints are written and how long they stay.

    Attributes:
        enabled: false: no checkpoint at all, not even on preemption.
        save_interval: steps between permanent checkpoints.
        ephemeral_save_interval: steps between checkpoints that stay until the next one; null: none.
        fixed_steps: further steps with a checkpoint, which is never removed.
        pre_train_checkpoint: also one of step 0, which is never removed.
        save_async: write beside the training, from a copy of the state in main memory (page-locked
            on CUDA) that is complete before the next step begins; default: on CUDA.
        save_timeout: seconds after which a save that is not finished, or a rank that does not
            answer in one, ends the run.
        remove: what goes after a new checkpoint is complete and has been read back:
            `ephemeral_only`, `all_non_permanent` or `never`; the newest good one always stays.
        max_checkpoints: so many of the checkpoints of `save_interval` stay, the newest; null: all.
    """

    enabled: bool = True
    save_interval: int = 250
    ephemeral_save_interval: int | None = None
    fixed_steps: list[int] = field(default_factory=list)
    pre_train_checkpoint: bool = False
    save_async: bool | None = None
    save_timeout: float = 3600.0
    remove: Removal = Removal.ephemeral_only
    max_checkpoints: int | None = None

    def __post_init__(self) -> None:
        for name in ("save_interval", "max_checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, not {value}")
        if self.ephemeral_save_interval is not None and not (
            1 <= self.ephemeral_save_interval < self.save_interval
        ):
            raise UsageError(
                f"ephemeral_save_interval {self.ephemeral_save_interval} is not between 1 and "
                f"save_interval {self.save_interval}",
                fix="ephemeral checkpoints are the frequent ones",
            )
        if any(step < 1 for step in self.fixed_steps):
            raise UsageError(
                f"fixed_steps are at least 1, not {min(self.fixed_steps)}",
                fix="use pre_train_checkpoint: true for step 0",
            )
        if not self.save_timeout > 0:
            raise UsageError(f"save_timeout is above 0, not {self.save_timeout:g}")
        if self.max_checkpoints is not None and self.remove is Removal.never:
            raise UsageError(
                "max_checkpoints has no effect with remove: never", fix="leave one of them out"
            )
        self._saver: Saver | None = None

    def pre_train(self) -> None:
        trainer = self.trainer
        background = self.save_async
        if background is None:
            background = trainer.world.device.type == "cuda"
        policy = SavePolicy(
            background=background,
            timeout=self.save_timeout,
            remove=self.remove,
            keep=self.max_checkpoints,
        )
        self._saver = Saver(
            trainer.save_folder,
            trainer.work_dir,
            trainer.world,
            policy,
            trainer.say,
            trainer.fence,
        )
        if self.pre_train_checkpoint and trainer.step == 0:
            trainer.save_checkpoint(Kind.fixed)

    def post_step(self) -> None:
        step, ephemeral = self.trainer.step, self.ephemeral_save_interval
        if step in self.fixed_steps:
            self.trainer.save_checkpoint(Kind.fixed)
        elif step % self.save_interval == 0:
            self.trainer.save_checkpoint(Kind.permanent)
        elif ephemeral is not None and step % ephemeral == 0 and step < self.trainer.stop_step:
            self.trainer.save_checkpoint(Kind.ephemeral)
        elif step == self.trainer.stop_step:  # before the end changes the state of any callback
            self.trainer.save_checkpoint(Kind.final, wait=True)

    def save_checkpoint(self, kind: Kind, *, wait: bool) -> None:
        assert self._saver is not None
        trainer = self.trainer
        if trainer.step in trainer.checkpoints:
            return
        trainer.flush_metrics()
        with trainer.pause():
            self._finish()
            if trainer.step not in trainer.checkpoints:  # or it was the one that ran
                self._saver.start(lambda: trainer.contents(kind), trainer.checkpoints)
                if wait or not self._saver.policy.background:
                    self._finish(must=wait)

    def post_train(self) -> None:
        self.trainer.save_checkpoint(Kind.final, wait=True)

    def close(self) -> None:
        self._finish()

    def _finish(self, *, must: bool = False) -> None:
        """Wait for the save that is running, and take in what came of it; on every rank alike."""
        saved = None if self._saver is None else self._saver.finish(must=must)
        if saved is None:
            return
        self.trainer.checkpoints[saved.step] = saved.kind
        for step in saved.removed:
            del self.trainer.checkpoints[step]
        self.trainer.checkpoint_saved(saved.folder)
