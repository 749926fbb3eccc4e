"""The callback protocol: hooks by name, a priority, own state.

The trainer calls each hook on every callback and on every rank, higher priority first, and knows
nothing else of them. A hook that prints or writes does so on rank 0 (`self.trainer.world.main`).

    pre_train -> [ pre_step -> pre_optim_step -> post_step -> evaluate
                   where a checkpoint is due: post_checkpoint_saved
                   every metrics_collect_interval steps: pre_log_metrics -> log_metrics ]
              -> post_train | on_error -> close

A checkpoint that is due, or asked for in `pre_train` or `post_step`, is written after that hook and
`evaluate` have run on every callback, so it holds the state of all of them after its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from olm_data.config.convert import Config

if TYPE_CHECKING:
    from torch import Tensor

    from olm_train.checkpoint.load import Checkpoint
    from olm_train.checkpoint.manager import CheckpointManager
    from olm_train.checkpoint.manifest import Kind
    from olm_train.data.batch import Batch
    from olm_train.data.loader import DataLoader
    from olm_train.distributed.world import World
    from olm_train.stability.report import BadSteps
    from olm_train.train_module_base import TrainModule


class TrainingRun(Protocol):
    """What a callback may use of the `Trainer`, which alone changes it.

    Attributes:
        train_module, data_loader, world: of this rank.
        save_folder, work_dir: the run's folder, local or remote; the local one of its logs.
        config: resolved configuration, plain values.
        config_changes: fields that differ from the checkpoint it went on from, `a.b: old -> new`.
        chosen: lines that say what was chosen for this device, and why; printed at the start.
        step: optimiser steps done.
        stop_step: step at which this run ends.
        resumed: whether it went on from a checkpoint.
        left: what callbacks still have to do for a run that has ended.
        bad_steps: those that it went back for.
        checkpoints: what saves them, and knows which ones there are.
        paused_seconds: time that was not spent on training.
    """

    train_module: TrainModule
    data_loader: DataLoader
    world: World
    save_folder: str
    work_dir: Path
    config: dict[str, Any]
    config_changes: tuple[str, ...]
    chosen: list[str]
    step: int
    stop_step: int
    resumed: bool
    left: list[str]
    bad_steps: BadSteps
    checkpoints: CheckpointManager
    paused_seconds: float

    def tokens_at(self, step: int) -> int: ...
    def say(self, message: str) -> None: ...
    def pause(self) -> AbstractContextManager[None]: ...
    def ask_to_stop(self) -> bool: ...
    def save_checkpoint(self, kind: Kind, *, wait: bool = False) -> None: ...
    def finish_save(self, *, must: bool = False) -> None: ...
    def load_checkpoint(self, checkpoint: Checkpoint) -> None: ...
    def take_step(self, batches: Sequence[Batch]) -> Mapping[str, Tensor | float]: ...
    def log_evaluation(self, results: Mapping[str, Mapping[str, float]]) -> None: ...


class Callback(Config):
    """Base of all callbacks: every hook does nothing. Its options are the fields of a dataclass.

    Attributes:
        priority: callbacks of higher priority run first.
        enabled: false: it is left out.
        trainer: the trainer it is attached to, set before the first hook.
    """

    priority: ClassVar[int] = 0
    enabled: bool = True
    trainer: TrainingRun

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values that a resumed run needs; called when a checkpoint is made."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint; called before `pre_train`."""

    def pre_train(self) -> None:
        """Runs once, after a checkpoint was loaded and before the first step."""

    def pre_step(self, batches: Sequence[Any]) -> None:
        """Runs before a step, with this rank's micro-batches of it."""

    def pre_optim_step(self) -> None:
        """Runs after the backward passes of a step, before the optimiser changes the weights."""

    def post_step(self) -> None:
        """Runs after a step; `trainer.step` counts it."""

    def evaluate(self) -> None:
        """Runs after `post_step` of all callbacks, and after `pre_train`: looks at the weights."""

    def left_to_do(self) -> list[str]:
        """Return what is still to do for a run that has ended, by name.

        Called after `load_state_dict`, where no step is left. If there is something, the weights
        are loaded and `pre_train`, `evaluate`, `post_train` and `close` run, without a step.
        """
        return []

    def post_checkpoint_saved(self, folder: str) -> None:
        """Runs after a checkpoint is complete; one saved beside the training: at the next save."""

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Runs when the metrics of a step have been read; may change them in place."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, steps ascending, each step once."""

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Takes the results of an evaluation after `step`, by data set."""

    def post_train(self) -> None:
        """Runs after the last step, not after an error or a preemption."""

    def on_error(self, error: BaseException) -> None:
        """Runs when the loop ends by an exception, which is raised again afterwards."""

    def close(self) -> None:
        """Runs last, whatever happened."""
