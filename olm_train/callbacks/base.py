"""The callback protocol: hooks by name, a priority, own state.

The trainer calls each hook on every callback and on every rank, higher priority first, and knows
nothing else of them. A hook that prints or writes does so on rank 0 (`self.trainer.world.main`).

    post_attach -> post_checkpoint_loaded -> pre_train
        -> [ pre_load_batch -> pre_epoch, at the first step of one
             -> pre_step -> change_batches -> post_backward -> pre_optim_step -> post_step
             -> evaluate
             where a checkpoint is due: post_checkpoint_saved
             every metrics_collect_interval steps: pre_log_metrics -> log_metrics
             where something happened that people are told of: on_event
             after the last step of an epoch, once the next one begins: post_epoch ]
        -> post_train | on_error -> close

A checkpoint that is due, or asked for in `pre_train` or `post_step`, is written after that hook and
`evaluate` have run on every callback, so it holds the state of all of them after its step.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from olm_data.bounded_json import JsonObject
from olm_data.config.convert import Config
from olm_data.errors import printable, shown
from olm_train.callbacks.notice import Event
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manager import CheckpointManager
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.resume import ResumableRun
from olm_train.distributed.preempt import Preemption, StopRequest
from olm_train.distributed.stop_file import StopFile
from olm_train.distributed.world import World
from olm_train.metrics import MetricsBuffer, Reduce
from olm_train.stability.report import BadSteps

DATA_WAIT = "data wait"
"""Name of the range around taking a batch, in a trace."""


class TrainingRun(ResumableRun, Protocol):
    """What a callback may use of the `Trainer`, which alone changes it, and is derived from it.

    Args:
        world: the ranks of the run.
        work_dir: local folder of its logs, and of its stop file.

    Attributes, besides those of `checkpoint.resume.Run`:
        world: the ranks.
        config_changes: fields that differ from the checkpoint it went on from, `a.b: old -> new`.
        chosen: lines that say what was chosen for this device, and why; printed at the start.
        resumed: whether it went on from a checkpoint.
        left: what callbacks still have to do for a run that has ended.
        cancelled: who ended the run before its last step, and why; None: nobody.
        bad_steps: those that it went back for.
        checkpoints: what saves them, and knows which ones there are.
        paused_seconds: time that was not spent on training.
        callbacks: all of them by name.
        blocking: ids of the callbacks that let no ephemeral checkpoint be saved.
    """

    world: World
    config_changes: tuple[str, ...] = ()
    chosen: list[str]
    resumed: bool = False
    left: list[str]
    cancelled: StopRequest | None = None
    bad_steps: BadSteps
    checkpoints: CheckpointManager
    paused_seconds: float = 0.0
    callbacks: Mapping[str, Callback]
    blocking: set[int]
    _preemption: Preemption
    _stop_file: StopFile
    _buffer: MetricsBuffer
    _metrics_step: int = 1  # that of what callbacks record

    def __init__(self, world: World, work_dir: Path) -> None:
        self.world, self.work_dir, self.blocking = world, work_dir, set()
        self._preemption, self._stop_file = Preemption(), StopFile(work_dir)
        self._buffer = MetricsBuffer(world)

    def tokens_at(self, step: int) -> int:
        """Return the tokens trained on after `step` steps; instances if the loader counts those."""
        return self.data_loader.tokens_before(step)

    def ask_to_stop(self) -> bool:
        """Agree with all ranks whether to stop; for long work outside the steps."""
        if self.world.main and (why := self._stop_file.found()) is not None:
            self._preemption.cancel("stop file", why)
        return self._preemption.ask() is not None

    def cancel_run(self, reason: str, *, by: str = "cancel_run") -> None:
        """End the run before its next step, on all ranks, with a checkpoint; any rank may ask.

        Args:
            reason: why, for the log.
            by: who asks, such as a callback's name.
        """
        self._preemption.cancel(by, reason)

    def record_metric(
        self, name: str, value: Tensor | float, *, reduce: Reduce | None = None
    ) -> None:
        """Add a metric to those of a step, to be logged with them.

        That is the step being taken, in `post_step` the one just taken, and the next one where
        those were logged already.

        Args:
            name: in the log; that of a metric of the step itself replaces it.
            value: a number, or a tensor of one element, which is not read before the others are. A
                DTensor, such as the norm of a sharded gradient, is recorded on every rank.
            reduce: over the ranks that recorded it; None: what rank 0 recorded.
        """
        self._buffer.record_one(self._metrics_step, name, value, reduce)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around work that is no training, so that throughput leaves it out."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.paused_seconds += time.monotonic() - start

    def say(self, message: str) -> None:
        """Print a line to stderr, on rank 0; names in it act on no terminal."""
        if self.world.main:
            print(shown(message), file=sys.stderr, flush=True)

    def tell(self, event: Event, step: int, text: str) -> None: ...
    def save_checkpoint(self, kind: Kind, *, wait: bool = False) -> None: ...
    def finish_save(self, *, raise_on_error: bool = False) -> None: ...
    def load_checkpoint(self, checkpoint: Checkpoint) -> None: ...
    def flush_metrics(self) -> None: ...
    def take_step(self, batches: Sequence[Any]) -> Mapping[str, Tensor | float]: ...
    def log_evaluation(self, results: Mapping[str, Mapping[str, float]]) -> None: ...


class Callback(Config):
    """Base of all callbacks: every hook does nothing. Its options are the fields of a dataclass.

    Attributes:
        priority: callbacks of higher priority run first.
        enabled: false: it is left out.
        whole_model: it needs all layers on each rank: refused with `train_module.pp_config`.
        trainer: the trainer it is attached to, set before the first hook.
    """

    priority: ClassVar[int] = 0
    whole_model: ClassVar[bool] = False
    enabled: bool = True
    trainer: TrainingRun

    def state_dict(self) -> JsonObject:
        """Return JSON values that a resumed run needs; called when a checkpoint is made."""
        return {}

    def load_state_dict(self, state: JsonObject) -> None:
        """Take over the state of a checkpoint; called before `pre_train`."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that a resumed run needs, by name; they lie in each checkpoint.

        Whole, or DTensors: then a run of another world gets its own shards. The live ones, on every
        rank alike. Where a run goes on it is called after `load_state_dict`, for tensors to be
        filled in place; those that are not there yet go to `load_tensors`.
        """
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> bool:
        """Take over tensors of a checkpoint that `tensors` does not have yet, such as those of a
        first step; whole, on the CPU, on every rank. Return whether you did: if not, it is said.
        """
        return False

    def documents(self) -> Mapping[str, bytes]:
        """Return files that each checkpoint is to hold, by name; called when one is made.

        A name is that of no file that checkpoints have already. Those of rank 0 are written.
        """
        return {}

    def evaluate_now(
        self, *, ignore_stop: bool = False
    ) -> Mapping[str, Mapping[str, float]] | None:
        """Return results of the model as it is now, by data set; every rank calls it.

        Asked for while other weights are in the model's place. Nothing is logged; default: none.

        Args:
            ignore_stop: whatever signal comes; else None is returned where one came meanwhile.
        """
        return {}

    def explicit_steps(self) -> Mapping[str, Sequence[int]]:
        """Return the steps that options name, by option; default: none.

        Of those after the last step of the run a note is made before the first one.
        """
        return {}

    def block_ephemeral_checkpoints(self) -> None:
        """Let no checkpoint be saved at `ephemeral_save_interval`, until it is unblocked.

        On every rank alike. One that a preemption asks for is saved all the same.
        """
        self.trainer.blocking.add(id(self))

    def unblock_ephemeral_checkpoints(self) -> None:
        """Take that back; others may still block them."""
        self.trainer.blocking.discard(id(self))

    def post_attach(self) -> None:
        """Runs when it has got its trainer, before anything is loaded.

        Of those that the `Trainer` is given, before the length of the run is known.
        """

    def post_checkpoint_loaded(self, folder: str) -> None:
        """Runs after state was taken from a checkpoint, of this run or of another."""

    def pre_train(self) -> None:
        """Runs once, after a checkpoint was loaded and before the first step."""

    def pre_epoch(self, epoch: int) -> None:
        """Runs before the first step of a pass over the data loader, and after a resume in one.

        A mixture lock is one pass, number 1: its sources have epochs of their own.
        """

    def post_epoch(self, epoch: int) -> None:
        """Runs after the last step of a pass, and at the end of a run within one."""

    def pre_load_batch(self) -> None:
        """Runs before the batches of a step are taken from the data loader."""

    def pre_step(self, batches: Sequence[Any]) -> None:
        """Runs before a step, with this rank's micro-batches of it."""

    def change_batches(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's micro-batches, as many, as the step takes them; default: as they are.

        Called at the beginning of each step, also of one that is repeated to be compared: what it
        returns follows from the batches and `trainer.step` alone.
        """
        return batches

    def post_backward(self) -> None:
        """Runs after the backward passes of a step: gradients of the global batch, not yet clipped.

        Not with a train module that never calls `TrainModule.gradients_ready`.
        """

    def pre_optim_step(self) -> None:
        """Runs after the backward passes of a step, before the optimiser changes the weights."""

    def post_step(self) -> None:
        """Runs after a step; `trainer.step` counts it."""

    def evaluate(self) -> None:
        """Runs after `post_step` of all callbacks, and after `pre_train`: looks at the weights."""

    def pending(self) -> list[str]:
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

    def on_event(self, event: Event, step: int, text: str) -> None:
        """Takes what a person may want to be told of, in words; on the ranks that know of it.

        Spikes and failed saves, and what callbacks `trainer.tell`; it may come from a thread beside
        the training, so that it must return at once. Starts and ends have hooks of their own.
        """

    def post_train(self) -> None:
        """Runs after the last step, not after an error or a preemption."""

    def on_error(self, error: BaseException) -> None:
        """Runs when the loop ends by an exception, which is raised again afterwards."""

    def close(self) -> None:
        """Runs last, whatever happened."""


def unreached(trainer: TrainingRun) -> list[str]:
    """Return what options ask for after the last step of a run, a line each."""
    last, named = trainer.stop_step, dict(trainer.checkpoints.config.explicit_steps())
    for name, callback in trainer.callbacks.items():
        named |= {f"{name}.{option}": [*s] for option, s in callback.explicit_steps().items()}
    late = {option: [step for step in steps if step > last] for option, steps in named.items()}
    return [
        f"trainer.callbacks.{printable(option)}: the run ends at step {last:,}, before step "
        + ", ".join(f"{step:,}" for step in steps[:3])
        + (", ..." if steps[3:] else "")
        for option, steps in late.items()
        if steps
    ]
