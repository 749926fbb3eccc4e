"""The training loop and the state it owns: step, loader state, callbacks' state.

    load -> [ next batches -> train step -> agree on stopping -> callbacks ] * -> close
              (loader)        (train module)  (preempt)        (checkpoints, evaluation, logs)

The trainer alone changes its state: what begins, saves or reports gives it values. What is done
around the steps is done by callbacks; the loop knows only their hooks. A run is its save folder:
calling `fit` again goes on from the newest checkpoint there that verifies.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from olm_data.config.convert import as_dict
from olm_data.errors import OlmError, shown
from olm_data.order.skip import Range
from olm_data.run_log.metric_names import NON_FINITE
from olm_data.storage.disk import write_durable
from olm_data.storage.store import absolute
from olm_train.callbacks.base import Callback
from olm_train.callbacks.group import Callbacks
from olm_train.checkpoint.carried import carried
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.logs import default_work_dir, fetch_logs, run_logs
from olm_train.checkpoint.manager import CheckpointManager
from olm_train.checkpoint.manifest import CONFIG, STATE, Kind
from olm_train.checkpoint.policy import CheckpointerConfig, LoadPolicy, LoadStrategy
from olm_train.checkpoint.resume import RunParts, StartingPoint, find_start, record, start_at
from olm_train.checkpoint.run_state import Origin
from olm_train.checkpoint.save import Contents
from olm_train.data.batch import Batch
from olm_train.data.loader import DataLoader
from olm_train.distributed.holding import Holding, LeasePolicy
from olm_train.distributed.preempt import LEASE_LOST, Preempted, Preemption
from olm_train.distributed.waiting import CommConfig, Waiting
from olm_train.duration import Duration, run_length
from olm_train.metrics import MetricsBuffer
from olm_train.optim.state import OptimizerState
from olm_train.stability.report import BadSteps, NonFiniteError
from olm_train.train_module_base import TrainModule

DATA_POLL_SECONDS = 0.2
"""How often a rank that waits for data looks whether it was asked to stop."""


class Trainer:
    """Trains a train module on the rows of a data loader.

    Args:
        train_module: model, loss and optimiser.
        data_loader: rows of a mixture lock, for this rank.
        save_folder, work_dir, max_duration, hard_stop, metrics_collect_interval, max_rewinds,
            time_limit, time_margin: as in train.yaml, see `run.config.TrainerConfig`.
        load: where to begin: with checkpoints in `save_folder`, or with another run's.
        checkpointer: when checkpoints are saved, and how long they stay.
        callbacks: by name. Console logger, metrics file, speed monitor and garbage collector are
            added unless one of that class, or of that name, is given.
        config: the resolved configuration as plain values, saved with each checkpoint.
        comm, lease: how long ranks wait for each other; how the save folder is held.
        chosen: lines that say what was chosen for this device, and why; printed at the start.

    Attributes are those of `callbacks.base.TrainingRun`; also:
        origin: path, step and digest of the checkpoint of another run that this one began with.

    Raises:
        UsageError: the lock has fewer steps than `max_duration` asks for.
    """

    def __init__(
        self,
        *,
        train_module: TrainModule,
        data_loader: DataLoader,
        save_folder: str | Path,
        work_dir: str | Path | None = None,
        max_duration: Duration | None = None,
        hard_stop: Duration | None = None,
        metrics_collect_interval: int = 5,
        load: LoadPolicy | None = None,
        max_rewinds: int = 3,
        time_limit: float | Literal["slurm"] | None = None,
        time_margin: float = 120.0,
        checkpointer: CheckpointerConfig | None = None,
        callbacks: Mapping[str, Callback] | None = None,
        config: Mapping[str, Any] | None = None,
        comm: CommConfig | None = None,
        lease: LeasePolicy | None = None,
        chosen: Sequence[str] = (),
    ) -> None:
        self.train_module, self.world = train_module, train_module.world
        self.data_loader = data_loader
        self.save_folder = absolute(str(save_folder))
        self.work_dir = Path(work_dir or default_work_dir(self.save_folder))
        self.metrics_collect_interval = metrics_collect_interval
        self.load_policy = load or LoadPolicy()
        known = as_dict({"model": train_module.model_config, "train_module": train_module.config})
        self.config = {**json.loads(json.dumps(known, default=str)), **(config or {})}
        self.config_changes: tuple[str, ...] = ()
        self.max_steps, self.stop_step = run_length(
            data_loader, train_module.num_params, max_duration, hard_stop
        )
        train_module.check_length(self.max_steps, self.tokens_at(self.max_steps))
        self.callbacks = Callbacks(callbacks or {}, self)
        self.step, self.resumed, self.paused_seconds = 0, False, 0.0
        self.left: list[str] = []
        self.chosen = list(chosen)
        self.origin: Origin | None = None
        self.bad_steps = BadSteps(data_loader, self.work_dir, self.world, max_rewinds, self.say)
        saving = checkpointer or CheckpointerConfig()
        self.checkpoints = CheckpointManager(
            self.save_folder, self.work_dir, self.world, saving, self.say
        )
        self._carried = carried(data_loader.lock, self.say) if self.world.main else {}
        self._holding = Holding(
            self.save_folder, self.work_dir, self.world, lease or LeasePolicy(), self.say
        )
        self.optimizer_state = OptimizerState(train_module.model, train_module.optimizer)
        self._buffer = MetricsBuffer()
        self._preemption = Preemption()
        self._time_limit = (time_limit, time_margin)
        self._asked: list[tuple[Kind, bool]] | None = None
        self._recordable = False
        self._waiting = Waiting(
            self.world, train_module.model, timeout=(comm or CommConfig()).train_timeout_seconds
        )

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
        self._preemption = preemption or Preemption()
        self._preemption.group = self.world.control_group
        self._preemption.limit_time(*self._time_limit)
        self.optimizer_state = self.optimizer_state.of(self.train_module.optimizer)
        with self._waiting, self._holding as held, self._preemption:
            self._preemption.lost = lambda: held.lost
            self.checkpoints.hold(held.fence)
            fetch_logs(self.save_folder, self.work_dir, self.world)
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
                    self.restore(LoadPolicy(strategy=LoadStrategy.always))

    def _start(self) -> None:
        """Train from the step reached, with everything around it opened and closed."""
        self._holding.check()
        if self.world.main:
            plain = json.dumps(self.config, indent=1).encode() + b"\n"
            write_durable(self.work_dir / CONFIG, plain)
        optimizer = self.train_module.optimizer
        hook = optimizer.register_step_pre_hook(lambda *_: self.callbacks.call("pre_optim_step"))
        try:
            self._train()
        except BaseException as error:
            self.callbacks.call("on_error", error)
            raise
        finally:
            hook.remove()
            try:
                self.finish_save()
            finally:
                self.callbacks.call("close")
                self.data_loader.close()

    def _train(self) -> None:
        first = self.checkpoints.config.kind_at(0, self.stop_step) if self.step == 0 else None
        self._around_step("pre_train", first)
        self._stop_if_asked()
        steps = iter(self.data_loader)
        while self.step < self.stop_step:
            while not self.data_loader.ready(DATA_POLL_SECONDS) and not self._preemption.asked:
                pass
            self.ask_to_stop()
            self._stop_if_asked()
            batches = self._next(steps)
            self.callbacks.call("pre_step", batches)
            metrics = self.take_step(batches)
            self._waiting.reached(self.step)
            self._buffer.record(self.step, metrics)
            self._preemption.at_once = False  # there is something to save
            if self.step % self.metrics_collect_interval == 0:
                self.flush_metrics()
            due = self.checkpoints.config.kind_at(self.step, self.stop_step)
            self._around_step("post_step", due)
        self.flush_metrics()
        self.save_checkpoint(Kind.final, wait=True)
        self.callbacks.call("post_train")

    def _around_step(self, hook: str, due: Kind | None) -> None:
        """Call a hook, evaluate, then save what is due: no state is a hook behind."""
        # Before the end of a run changes the state of any callback, its last save is complete.
        self._asked = [] if due is None else [(due, due is Kind.final)]
        self.callbacks.call(hook)
        asked, self._asked = self._asked, None
        if self.step and not self._recordable:  # what cannot be saved is refused at once
            self._recordable = bool(self._record())
        self.callbacks.call("evaluate")
        for kind, wait in asked:
            self.save_checkpoint(kind, wait=wait)

    def _next(self, steps: Iterator[Any]) -> Any:
        """Return the batches of the next step; where there are none, save what was trained.

        Only alone: with several ranks the others may be in the middle of a collective.
        """
        try:
            return next(steps)
        except OlmError:
            if self.world.size == 1 and self.step:
                self.save_checkpoint(Kind.ephemeral, wait=True)
            raise

    def _stop_if_asked(self) -> None:
        """End the run with a checkpoint if all ranks agreed to, unless it has ended anyway.

        Without one where another run has taken over.
        """
        agreed = self._preemption.agreed
        if agreed == LEASE_LOST:
            self._holding.check()
        if agreed and self.step < self.stop_step:
            if self.step:
                self.save_checkpoint(Kind.ephemeral, wait=True)
            raise Preempted(agreed, self.step)

    # ---- what callbacks use --------------------------------------------------------------------

    def tokens_at(self, step: int) -> int:
        """Return the tokens trained on after `step` steps."""
        return self.data_loader.tokens_before(step)

    def take_step(self, batches: Sequence[Batch]) -> Mapping[str, Tensor | float]:
        """Train on the batches of the next step; return its metrics, still on the device."""
        metrics = self.train_module.train_step(
            batches,
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
        for step, metrics in self._buffer.collect():
            if metrics.pop(NON_FINITE, 0.0):
                self._holding.check()
                metrics |= self.bad_steps.told(step, metrics, self.train_module.non_finite)
            self.callbacks.call("pre_log_metrics", step, metrics)
            self.callbacks.call("log_metrics", step, metrics)

    def log_evaluation(self, results: Mapping[str, Mapping[str, float]]) -> None:
        """Hand evaluation results of the current step to the callbacks, after its metrics."""
        self.flush_metrics()
        self.callbacks.call("log_evaluation", self.step, results)

    def ask_to_stop(self) -> bool:
        """Agree with all ranks whether a signal came; for long work outside the steps."""
        return bool(self._preemption.ask())

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
                self.checkpoints.start(lambda: self._contents(kind))
                if wait or not self.checkpoints.background:
                    self.finish_save(must=wait)

    def finish_save(self, *, must: bool = False) -> None:
        """Wait for the save that is running, if any; `must`: raise its error. All ranks call it."""
        folder = self.checkpoints.finish(must=must)
        if folder is not None:
            self.callbacks.call("post_checkpoint_saved", folder)

    def restore(self, policy: LoadPolicy | None = None) -> None:
        """Go to where the run begins, by the trainer's policy or another; every rank calls it."""
        start = find_start(self.checkpoints, policy or self.load_policy, self._parts())
        self._go_to(start)
        self.config_changes = start.changes

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Go to a checkpoint of this run; every rank calls it."""
        self._go_to(start_at(checkpoint, self._parts()))

    def _go_to(self, start: StartingPoint) -> None:
        self.callbacks.load_states(start.callbacks)
        self.origin = start.origin
        if start.resumed:
            self.step, self.resumed = start.step, True
            if self.step >= self.stop_step:
                self.left = self.callbacks.left_to_do()
                if not self.left:
                    return
        start.load()

    def _parts(self) -> RunParts:
        return RunParts(
            train_module=self.train_module,
            optimizer_state=self.optimizer_state,
            data_loader=self.data_loader,
            config=self.config,
            max_steps=self.max_steps,
            stop_step=self.stop_step,
            say=self.say,
        )

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
        if self.stop_step > loader.steps:
            self.stop_step = loader.steps
            self.say(f"note: the rows left out shorten the run to {loader.steps:,} steps")

    def _record(self) -> bytes:
        """Return `train.json`; ready bytes, as what callbacks hand out may change meanwhile."""
        return record(self._parts(), self.step, self.callbacks, self.origin).encode()

    def _contents(self, kind: Kind) -> Contents:
        """Return what a checkpoint of the current step holds; its tensors are the live ones."""
        return Contents(
            step=self.step,
            kind=kind,
            state=self.train_module.state_dict(),
            documents={STATE: self._record(), CONFIG: self.config, **self._carried},
            lock_digest=self.data_loader.lock.digest,
            logs=run_logs(self.work_dir),
        )
