"""The training loop and the state it owns: step, loader state, callbacks' state.

    load -> [ next batches -> train step -> agree on stopping -> callbacks ] * -> close
              (loader)        (train module)  (preempt)        (checkpoints, evaluation, logs)

The trainer alone changes its state: what begins, saves or reports gives it values. What is done
around the steps is done by callbacks; the loop knows only their hooks. A run is its save folder:
calling `fit` again goes on from the newest checkpoint there that verifies.

The next step of a data loader, agreed by the ranks where its length is not known.

    iterator -> batches on every rank | None on every rank: the data have ended
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.profiler import record_function

from olm_data.bounded_json import JsonObject
from olm_data.config.arguments import checked
from olm_data.config.convert import as_dict
from olm_data.config.hints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_data.order.steps import Range
from olm_data.run_log.metric_names import NON_FINITE
from olm_data.storage.store import absolute
from olm_train.callbacks.base import DATA_WAIT, Callback, TrainingRun
from olm_train.callbacks.group import Callbacks
from olm_train.callbacks.notice import Event
from olm_train.checkpoint.documents import default_work_dir
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manager import CheckpointManager
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.policy import CheckpointerConfig, LoadPolicy, LoadStrategy
from olm_train.checkpoint.resume import StartingPoint
from olm_train.checkpoint.unsaved import Unsaved
from olm_train.data.base import DataLoaderBase
from olm_train.distributed.holding import LeasePolicy, RunLock
from olm_train.distributed.preempt import LEASE_LOST, Preempted, Preemption
from olm_train.distributed.waiting import CommConfig, RankWatchdog
from olm_train.distributed.world import World
from olm_train.duration import Duration, run_length
from olm_train.metrics import MetricsBuffer
from olm_train.optim.state import OptimizerState
from olm_train.stability.report import BadSteps, NonFiniteError
from olm_train.train_module_base import TrainModule, require_parts

DATA_POLL_SECONDS = 0.2
"""How often a rank that waits for data looks whether it was asked to stop."""


class Trainer(TrainingRun):
    """Trains a train module on the steps of a data loader.

    Args:
        train_module: model, loss and optimiser.
        data_loader: of this rank: rows of a mixture lock, or another `DataLoaderBase`.
        save_folder, work_dir, max_duration, hard_stop, metrics_collect_interval, max_rewinds,
            time_limit, time_margin: as in train.yaml, see `run.config.TrainerConfig`.
        load: where to begin: with checkpoints in `save_folder`, or with another run's.
        checkpointer: when checkpoints are saved, and how long they stay.
        callbacks: by name. Console logger, metrics file, rates, speed monitor, garbage collector
            are added unless one of that class, or of that name, is given.
        config: the resolved configuration as plain values, saved with each checkpoint.
        comm, lease: how long ranks wait for each other; how the save folder is held.
        chosen: lines that say what was chosen for this device, and why; printed at the start.
        on_cancel: what a cancelled run does, see `run.config.TrainerConfig`.

    Attributes are those of `callbacks.base.TrainingRun`; also:
        origin: path, step and digest of the checkpoint of another run that this one began with.
        cancelled: who ended the run before its last step, and why; None: nobody.

    Raises:
        UsageError: the data have fewer steps than `max_duration` asks for.
    """

    callbacks: Callbacks

    @checked("train_module", "data_loader", "max_duration", "hard_stop")
    def __init__(
        self,
        *,
        train_module: TrainModule,
        data_loader: DataLoaderBase,
        save_folder: str | Path,
        work_dir: str | Path | None = None,
        max_duration: Duration | None = None,
        hard_stop: Duration | None = None,
        metrics_collect_interval: PositiveInt = 5,
        load: LoadPolicy | None = None,
        max_rewinds: NonNegativeInt = 3,
        time_limit: PositiveFloat | Literal["slurm"] | None = None,
        time_margin: NonNegativeFloat = 120.0,
        checkpointer: CheckpointerConfig | None = None,
        callbacks: Mapping[str, Callback] | None = None,
        config: JsonObject | None = None,
        comm: CommConfig | None = None,
        lease: LeasePolicy | None = None,
        chosen: Sequence[str] = (),
        on_cancel: Literal["finish", "requeue"] = "finish",
    ) -> None:
        require_parts(train_module, data_loader, max_duration, hard_stop)
        if data_loader.lock is not None and data_loader.lock.loss_weights:
            train_module.require_weighing()
        self.train_module, self.data_loader = train_module, data_loader
        self.save_folder = absolute(str(save_folder))
        super().__init__(train_module.world, Path(work_dir or default_work_dir(self.save_folder)))
        self.metrics_collect_interval = metrics_collect_interval
        self.load_policy = load or LoadPolicy()
        known = as_dict({"model": train_module.model_config, "train_module": train_module.config})
        self.config = {**json.loads(json.dumps(known, default=str)), **as_dict(config or {})}
        self.left, self.chosen = [], list(chosen)
        self.bad_steps = BadSteps(data_loader, self.work_dir, self.world, max_rewinds, self.say)
        self.checkpoints = CheckpointManager(self, checkpointer or CheckpointerConfig())
        self._holding = RunLock(
            self.save_folder, self.work_dir, self.world, lease or LeasePolicy(), self.say
        )
        self.optimizer_state = OptimizerState(train_module.model, train_module.optimizer)
        self._on_cancel = on_cancel
        self._epoch = 0  # the pass over the data loader that was begun; 0: none
        self._time_limit = (time_limit, time_margin)
        self._asked: list[tuple[Kind, bool]] | None = None
        self._unsaved: Unsaved | None = None
        self._recordable = self._fitting = False
        self._waiting = RankWatchdog(
            self.world, train_module.model, timeout=(comm or CommConfig()).train_timeout_seconds
        )
        self.callbacks = Callbacks(callbacks or {}, self)
        self.max_steps, self.stop_step = run_length(
            data_loader, train_module.num_params, max_duration, hard_stop
        )
        train_module.check_length(self.max_steps, self.tokens_at(self.max_steps))

    def _repr_html_(self) -> str:
        """Return what notebooks show: its facts."""
        from olm_data.printing import as_html

        lock = self.data_loader.lock
        facts = {
            "save folder": self.save_folder,
            "step": self.step,
            "steps": self.stop_step,
            "parameters": self.train_module.num_params,
            "ranks": self.world.size,
            "mixture": lock and lock.digest,
            "callbacks": [*self.callbacks],
        }
        return as_html(facts)

    # ---- the loop ------------------------------------------------------------------------------

    def fit(self, preemption: Preemption | None = None) -> None:
        """Train to the end, going on from the newest checkpoint if there is one.

        Args:
            preemption: the signal handlers of the command, already there; default: own ones.

        Raises:
            Preempted: a signal or the time limit asked to stop; the checkpoint is on disk.
            ValidationError: the checkpoint belongs to another mixture, model or batch size.
            ConflictError: another process trains into this folder, or has taken it over; or `never`
                found a checkpoint.
            NonFiniteError: a non-finite loss or gradient; nothing changed since the step before.
            RanksLostError: other ranks hang or died; names them and each rank's last step.
        """
        self._fitting = True
        asked, self._preemption = self._preemption, preemption or Preemption()
        self._preemption.take(asked)
        self._preemption.group = self.world.control_group
        self._preemption.limit_time(*self._time_limit)
        self.optimizer_state = self.optimizer_state.of(self.train_module.optimizer)
        with self._waiting, self._holding as held, self._preemption:
            self._preemption.lost = lambda: held.lost
            self.checkpoints.hold(held.fence)
            if self.load_policy.strategy is not LoadStrategy.never:
                self._leave_out(self.bad_steps.earlier())
            self.restore()
            if self.step >= self.stop_step:
                rest = f"still to do: {', '.join(self.left)}" if self.left else "nothing to do"
                self.say(f"already finished at step {self.step:,}: {rest}")
            while self.step < self.stop_step or self.left:
                try:
                    self._start()
                    return
                except NonFiniteError as error:
                    policy, saved = self.train_module.non_finite, self.checkpoints.saved
                    self.bad_steps.count_rewind(error, policy, can_go_back=bool(saved))
                    self._leave_out(error.rows)
                    self._buffer = MetricsBuffer(self.world)
                    self.restore(LoadPolicy(strategy=LoadStrategy.always))

    def _start(self) -> None:
        """Train from the step reached, with everything around it opened and closed."""
        self._holding.check()
        if self.world.main:
            self.checkpoints.write_config()
        try:
            with self.callbacks.within(self.train_module):
                self._train()
        except BaseException as error:
            self.callbacks.after(error)
            raise
        finally:
            try:
                self.finish_save()
            finally:
                self.callbacks.close(self.data_loader.close)
                if names := self._buffer.names():
                    self.say(f"note: recorded after the last step, not logged: {', '.join(names)}")

    def _train(self) -> None:
        first = self.checkpoints.config.kind_at(0, self.stop_step) if self.step == 0 else None
        self._around_step("pre_train", first)
        self._stop_if_asked()
        steps, module = iter(self.data_loader), self.train_module
        if not self._recordable:
            self._unsaved = Unsaved({"model": module.model, "loss": getattr(module, "loss", None)})
        while self.step < self.stop_step:
            with record_function(DATA_WAIT):
                self._await_text()
                while not self.data_loader.ready(DATA_POLL_SECONDS) and not self._preemption.asked:
                    pass
            self.ask_to_stop()
            if self._stop_if_asked():
                break
            self._metrics_step = self.step + 1
            self.callbacks.call("pre_load_batch")
            if (batches := self._next(steps)) is None:
                break
            self._enter_epoch(self.data_loader.epoch)
            self.callbacks.call("pre_step", batches)
            metrics = self.take_step(batches)
            self._waiting.reached(self.step)
            self._buffer.record(self.step, metrics)
            self._preemption.at_once = False  # there is something to save
            due = self.checkpoints.config.kind_at(self.step, self.stop_step)
            blocked = due is Kind.ephemeral and self.blocking
            self._around_step("post_step", None if blocked else due)
        self.flush_metrics()
        self._enter_epoch(0)
        self.save_checkpoint(Kind.final, wait=True)
        self.callbacks.call("post_train")

    def _await_text(self) -> None:
        """Wait for text that is still being tokenised: rank 0 looks, and tells the others.

        Each look is an exchange, so that no wait of a rank for another is long.
        """
        while self.data_loader.awaited and not self.ask_to_stop():
            lock, line = self.world.on_main(self.data_loader.look)
            if line is not None:
                self.say(f"step {self.step + 1:,}: {line}")
            if lock is not None:
                self.data_loader.follow(lock)
                self.say(f"step {self.step + 1:,}: text has arrived: {self.data_loader!r}")

    def _around_step(self, hook: str, due: Kind | None) -> None:
        """Call a hook, evaluate, then save what is due: no state is a hook behind."""
        # Before the end of a run changes the state of any callback, its last save is complete.
        self._asked = [] if due is None else [(due, due is Kind.final)]
        self.callbacks.call(hook)
        if self.step % self.metrics_collect_interval == 0:
            self.flush_metrics()
        asked, self._asked = self._asked, None
        if self.step and not self._recordable:  # what cannot be saved is refused at once
            self.checkpoints.check_state()
            self._recordable = True
            if self._unsaved is not None and (changed := self._unsaved.changed()):
                self.say(
                    f"note: a step changes what no checkpoint holds: {', '.join(changed[:5])}; a "
                    "run that goes on begins with their first values. Keep them in persistent "
                    "buffers, or in state_dict of a callback"
                )
            self._unsaved = None
        self.callbacks.call("evaluate")
        for kind, wait in asked:
            self.save_checkpoint(kind, wait=wait)

    def _next(self, steps: Iterator[Any]) -> Any:
        """Return the batches of the next step; None where data of unknown length have ended.

        Where they cannot be read, what was trained is saved, if this rank is alone: with several
        ranks the others may be in the middle of a collective.
        """
        try:
            loader, reached = self.data_loader, self.step
            batches = next_batches(steps, loader, self.world, reached=reached, say=self.say)
        except OlmError:
            if self.world.size == 1 and self.step:
                self.save_checkpoint(Kind.ephemeral, wait=True)
            raise
        if batches is None:
            self.stop_step = self.step
        return batches

    def _enter_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            if self._epoch:
                self.callbacks.call("post_epoch", self._epoch)
            self._epoch = epoch
            if epoch:
                self.callbacks.call("pre_epoch", epoch)

    def _stop_if_asked(self) -> bool:
        """Leave the loop if all ranks agreed to, unless the run has ended anyway.

        Returns:
            Whether the run was cancelled, and ends here.

        Raises:
            Preempted: it is to be gone on with; the checkpoint is on disk.
            ConflictError: another run has taken over; no checkpoint.
        """
        request = self._preemption.request
        if request is None or self.step >= self.stop_step:
            return False
        if request.code == LEASE_LOST:
            self._holding.check()
        if request.cancelled:
            self.cancelled = request
            self.say(f"cancelled at step {self.step:,} by {request}")
            if self.world.main:
                self._stop_file.remove()
            if self._on_cancel == "finish":
                return True
        if self.step:
            self.save_checkpoint(Kind.ephemeral, wait=True)
        raise Preempted(request, self.step)

    # ---- what callbacks use --------------------------------------------------------------------

    def add_callback(self, name: str, callback: Callback) -> None:
        """Attach a callback, before `fit`.

        Raises:
            UsageError: there is one of that name, or the run has begun.
        """
        if self._fitting:
            raise UsageError(
                f"the callback {name!r} comes too late: the run has begun",
                fix="add it before fit()",
            )
        self.callbacks.add(name, callback)

    def tell(self, event: Event, step: int, text: str) -> None:
        """Hand an event of the run to the callbacks, see `Callback.on_event`; from any thread."""
        self.callbacks.call("on_event", event, step, text)

    def take_step(self, batches: Sequence[Any]) -> Mapping[str, Tensor | float]:
        """Train on the batches of the next step; return its metrics, still on the device."""
        metrics = self.train_module.train_step(
            self.callbacks.changed(batches),
            self.step + 1,
            self.max_steps,
            tokens=(self.tokens_at(self.step + 1), self.tokens_at(self.max_steps)),
            batch_growth=self.data_loader.batch_sizes.growth(self.step),
        )
        self.step += 1
        return metrics

    def flush_metrics(self) -> None:
        """Read all metrics from the device and hand them to the callbacks, step by step.

        Raises:
            NonFiniteError: a step is bad, and the policy is not to go on.
        """
        self._metrics_step = self.step + 1
        for step, metrics in self._buffer.collect(self.step):
            if metrics.pop(NON_FINITE, 0.0):
                self._holding.check()
                metrics |= self.bad_steps.told(step, metrics, self.train_module.non_finite)
            self.callbacks.call("pre_log_metrics", step, metrics)
            self.callbacks.call("log_metrics", step, metrics)

    def log_evaluation(self, results: Mapping[str, Mapping[str, float]]) -> None:
        """Hand evaluation results of the current step to the callbacks, after its metrics."""
        self.flush_metrics()
        self.callbacks.call("log_evaluation", self.step, results)

    @checked()
    def save_checkpoint(self, kind: Kind, *, wait: bool = False) -> None:
        """Save a checkpoint of the current step, unless there is one; every rank calls it.

        Asked for in `pre_train` or `post_step`, it is written once that hook has run everywhere.

        Args:
            kind: decides how long it stays.
            wait: return when it is complete, and raise if it fails.
        """
        if self._asked is not None:
            self._asked.append((kind, wait))
            return
        if not self.checkpoints.wants(self.step):
            return
        self.flush_metrics()
        with self.pause():
            self.finish_save()
            if self.checkpoints.wants(self.step):  # or it was the one that ran
                self.checkpoints.start(kind)
                if wait or not self.checkpoints.background:
                    self.finish_save(raise_on_error=wait)

    def finish_save(self, *, raise_on_error: bool = False) -> None:
        """Wait for the save that is running, if any; `must`: raise its error. All ranks call it."""
        folder = self.checkpoints.finish(raise_on_error=raise_on_error)
        if folder is not None:
            self.callbacks.call("post_checkpoint_saved", folder)
        elif (failure := self.checkpoints.take_failure()) is not None:
            self.tell(Event.save_failed, self.step, str(failure))

    def restore(self, policy: LoadPolicy | None = None) -> None:
        """Go to where the run begins, by the trainer's policy or another; every rank calls it."""
        start = self.checkpoints.find_start(policy or self.load_policy)
        self._go_to(start)
        self.config_changes = start.changes

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Go to a checkpoint of this run; every rank calls it."""
        self._go_to(self.checkpoints.start_at(checkpoint))

    def _go_to(self, start: StartingPoint) -> None:
        self._epoch = 0
        self.callbacks.load_states(start.callbacks)
        self.origin = start.origin
        if start.resumed:
            self.step, self.resumed = start.step, True
            self._metrics_step = self.step + 1
            if self.step >= self.stop_step:
                self.left = self.callbacks.pending()
                if not self.left:
                    return
        start.load()
        if start.folder is not None:
            self.callbacks.call("post_checkpoint_loaded", start.folder)

    def _leave_out(self, rows: Sequence[Range]) -> None:
        """Leave rows out from here on, which may make the run shorter than its schedule."""
        loader = self.data_loader
        if not rows:
            return
        loader.leave_out(rows)
        if "data_loader" in self.config:
            skip = [list(item) for item in loader.skip]
            changed = {**self.config["data_loader"], "skip": skip}
            self.config = {**self.config, "data_loader": changed}
        if loader.steps is not None and self.stop_step > loader.steps:
            self.stop_step = loader.steps
            self.say(f"note: the rows left out shorten the run to {loader.steps:,} steps")


def next_batches(
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
