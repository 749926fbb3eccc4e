"""The checkpoints of a run: saved one at a time, kept as long as they should stay, found again.

    start:  copy the tensors -> write | thread: write -> verify -> remove what may go
    finish: wait -> folder | None: it failed, was said, and the next save is the second try
    find_start: clean partial folders -> newest that verifies | load_path | initial weights

The one door of a trainer into this room: it reads the run, and hands back values; what it finds is
put in place by the trainer alone.

A save beside the training has a gloo group of its own, so that its exchanges never meet those of a
step. Nothing is removed before the new checkpoint has been read back whole, so whatever becomes of
a save, the last good checkpoint is there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from msgspec.structs import replace as replace_fields

from olm_data.errors import (
    ConflictError,
    InputError,
    OlmError,
    ResourceError,
    StorageError,
    ValidationError,
)
from olm_data.storage.disk import write_durable
from olm_data.storage.lease import Fence
from olm_data.storage.store import Store
from olm_train.checkpoint.documents import carried, encoded, fetch_logs, run_logs
from olm_train.checkpoint.load import Checkpoint, newest_checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import (
    CONFIG,
    LOCK,
    MERGE,
    STATE,
    CheckpointManifest,
    Kind,
    folder_name,
    remove_checkpoint,
    swept,
)
from olm_train.checkpoint.merged import Merge
from olm_train.checkpoint.policy import CheckpointerConfig, LoadPolicy, LoadStrategy, removable
from olm_train.checkpoint.resume import (
    ResumableRun,
    StartingPoint,
    begin,
    documents_of_callbacks,
    record,
    resume,
    start_at,
    tensors_of_callbacks,
)
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.checkpoint.state import FlatState, HostCopy, StateDict, flatten, split
from olm_train.distributed.world import quiet_alone

Saved = tuple[str, list[int]]
"""Folder of a new checkpoint; steps of the older ones that were removed after it."""


class CheckpointManager:
    """Saves, keeps and finds the checkpoints of a run; every rank makes one and calls it alike.

    Args:
        run: what is saved and restored; read when a method is called.
        config: when and how to save.

    Attributes:
        saved: kind of each complete checkpoint by step.
        background: whether saves run beside the training.
        fence: the run's lease on the save folder; None: it is not held.
    """

    def __init__(self, run: ResumableRun, config: CheckpointerConfig) -> None:
        self.config, self._run, world = config, run, run.train_module.world
        self.saved: dict[int, Kind] = {}
        self.fence: Fence | None = None
        default = world.device.type == "cuda"
        self.background = default if config.save_async is None else config.save_async
        self._copy = HostCopy()
        self._running: Future[Saved] | None = None
        self._failure: OlmError | None = None
        self._step, self._kind = 0, Kind.final
        self._world, self._saving = world, world
        lock = run.data_loader.lock
        self._carried = carried(lock, run.say) if world.main and lock else {}

    def hold(self, fence: Fence) -> None:
        """Begin to save, under a lease; every rank calls it.

        The logs of a remote save folder are brought here. The ranks that save have a group of their
        own from here on.
        """
        self.fence = fence
        fetch_logs(self._run.save_folder, self._run.work_dir, self._world)
        if self._world.size > 1 and self.config.enabled:
            timeout = timedelta(seconds=self.config.save_timeout)
            group = dist.new_group(backend="gloo", timeout=timeout)
            self._saving = replace(self._world, exchange_group=group)

    def find_start(self, policy: LoadPolicy) -> StartingPoint:
        """Return where the run begins; every rank calls it. The data loader is put there.

        Partial folders are cleaned. Newer checkpoints that do not verify are passed over, and said.
        Where there is none, see `resume.begin`.

        Raises:
            ConflictError: there is a checkpoint and the strategy is `never`.
            InputError, ValidationError: there are checkpoints but none verifies (`strict`: the
                newest does not), there is none and the strategy is `always`, `load_path` has none,
                or it belongs to another mixture, model or batch size.
        """
        checkpoint = self._newest(policy)
        return begin(policy, self._run) if checkpoint is None else resume(checkpoint, self._run)

    def start_at(self, checkpoint: Checkpoint) -> StartingPoint:
        """Return the start at a checkpoint of this run; every rank calls it.

        Raises:
            ValidationError: it belongs to another mixture, model or batch size, or contradicts
                itself.
        """
        return start_at(checkpoint, self._run)

    def write_config(self) -> None:
        """Write the configuration of the run beside its logs."""
        write_durable(self._run.work_dir / CONFIG, encoded(self._run.config))

    def _newest(self, policy: LoadPolicy) -> Checkpoint | None:
        folder, world = self._run.save_folder, self._world
        found, gone = world.on_main(lambda: swept(folder, self.fence))
        if found and policy.strategy is LoadStrategy.never:
            raise ConflictError(
                f"there is a run here already, with the checkpoint {found[0]}",
                where=folder,
                why="load_strategy is `never`: a new run would write over it",
                fix="choose another trainer.save_folder, or remove the old run",
            )
        damaged: list[OlmError] = []
        checkpoint = newest_checkpoint(folder, world, damaged.append, names=found)
        if policy.strategy is LoadStrategy.never:
            gone = []
        for error in [*damaged, *gone]:
            self._run.say(f"warning: {error.what} ({error.where})")
        if checkpoint is not None:
            if damaged and policy.strict:
                raise ValidationError(
                    "the newest checkpoint does not verify",
                    where=folder,
                    why="; ".join(error.what for error in damaged),
                    fix=f"restore it, or go on from step {checkpoint.step:,} without --strict",
                )
            if damaged or gone:
                self._run.say(
                    f"warning: falling back to the checkpoint of step {checkpoint.step:,}"
                )
            self.saved = world.on_main(lambda: _known(folder, checkpoint, found))
        elif damaged or gone or (policy.strategy is LoadStrategy.always and policy.path is None):
            raise ValidationError(
                "there is no usable checkpoint",
                where=folder,
                why="; ".join(error.what for error in [*damaged, *gone])
                or "load_strategy is `always` and there is none at all",
                fix="restore one, or start a new run in another trainer.save_folder; where all are "
                "to be forgotten, remove this one, or give load_strategy `never`",
            )
        return checkpoint

    def wants(self, step: int) -> bool:
        """Whether a checkpoint of `step` may be saved: there is none yet, and saving is on."""
        return self.config.enabled and step not in self.saved

    def check_state(self) -> None:
        """Raise the UsageError of what a checkpoint could not give back; every rank calls it."""
        record(self._run)
        split(self._tensors())
        documents_of_callbacks(self._run)

    def start(self, kind: Kind) -> None:
        """Save the run as it is; beside the training, return as soon as the tensors are copied.

        A resource or storage error of a callback that gives its state is one of the save, on every
        rank.
        """
        assert self._running is None, "finish the one before"
        quiet_alone(self._saving)
        running: Future[Saved] = Future()
        known = dict(self.saved)
        made: Contents | OlmError
        try:
            made = self._contents(kind)
        except (ResourceError, StorageError) as error:
            made = error
        found = self._saving.gather(made if isinstance(made, OlmError) else None)
        contents = next((failure for failure in found if failure is not None), made)
        self._running = running  # not before: any other error ends the run at once
        if isinstance(contents, OlmError):
            self._failed(running, contents)
            return
        self._step, self._kind = contents.step, contents.kind
        if not self.background:
            self._write(running, contents, known)
            return
        assert isinstance(contents.state, Mapping)
        contents = replace(contents, state=self._copy.of(contents.state))
        name = f"checkpoint of step {contents.step}"
        thread = threading.Thread(
            target=self._write, args=(running, contents, known), name=name, daemon=True
        )
        thread.start()

    def finish(self, *, raise_on_error: bool = False) -> str | None:
        """Wait for the save that is running; return its folder, None if there is none or it failed.

        Args:
            raise_on_error: of one that failed; else it was said, and training goes on.

        Raises:
            ResourceError: it takes longer than the timeout, or a rank was lost.
            OlmError: what it failed with, if `must`; a conflict in any case.
        """
        if self._running is None:
            return None
        running, self._running = self._running, None
        try:
            folder, removed = running.result(timeout=self.config.save_timeout)
        except (ResourceError, StorageError) as error:
            if raise_on_error:
                raise
            self._failure = error
            return None
        except TimeoutError as error:
            raise ResourceError(
                f"the checkpoint of step {self._step} is not written after "
                f"{self.config.save_timeout:g} seconds",
                where=self._run.save_folder,
                why="training on would leave the run without a checkpoint",
                fix="see why the disk is slow, or give checkpointer.save_timeout more seconds",
            ) from error
        except RuntimeError as error:
            if self._world.size == 1:
                raise
            # Of the gloo group: the ranks are out of step.
            raise ResourceError(
                f"the ranks lost contact while saving step {self._step}",
                where=self._run.save_folder,
                why=str(error).strip().partition("\n")[0],
                fix="run the same command again: it goes on from the newest good checkpoint",
            ) from error
        self.saved[self._step] = self._kind
        for step in removed:
            del self.saved[step]
        return folder

    def take_failure(self) -> OlmError | None:
        """Return what the save failed with that `finish` waited for, once; None: it did not."""
        failure, self._failure = self._failure, None
        return failure

    def _contents(self, kind: Kind) -> Contents:
        """Return what a checkpoint holds now; its tensors are the live ones."""
        run = self._run
        tensors = self._tensors()  # first: after an evaluation it cuts weights again
        state = record(run).encode()  # bytes: what callbacks hand out may change meanwhile
        documents = {**documents_of_callbacks(run), STATE: state, **self._beside_state()}
        return Contents(
            step=run.step,
            kind=kind,
            state=tensors,
            documents=documents,
            lock_digest=self._lock_digest,
            logs=run_logs(run.work_dir),
        )

    @property
    def _lock_digest(self) -> str:
        lock = self._run.data_loader.lock
        return lock.digest if lock else ""

    def _beside_state(self) -> dict[str, bytes]:
        """Return the configuration and what is carried, the lock as far as it has grown."""
        lock = self._run.data_loader.lock
        now = {LOCK: lock.encode()} if LOCK in self._carried and lock is not None else {}
        return {CONFIG: encoded(self._run.config), **self._carried, **now}

    def _tensors(self) -> FlatState:
        """Return what a checkpoint has beside its documents, by name; the tensors are live."""
        state = self._run.train_module.state_dict()
        return {**flatten(state), **tensors_of_callbacks(self._run)}

    def save_merged(self, weights: StateDict, merge: Merge, suffix: str) -> str:
        """Write merged weights as a checkpoint of their own, beside those of the run.

        Every rank calls it. It is never removed, and no run goes on from it.

        Args:
            weights: of the model by name, whole or sharded.
            merge: what they are the mean of.
            suffix: of the folder's name, as in `step00000100-merged`.

        Returns:
            Its folder; one with the very same `merge.json` stays as it is.

        Raises:
            ResourceError, StorageError: it cannot be written.
            ConflictError: another one is there, or the lease is lost.
        """
        run, world = self._run, self._world
        state = replace_fields(record(run, callbacks=False), step=merge.last).encode()
        contents = Contents(
            step=merge.last,
            kind=Kind.fixed,
            state={"model": weights},
            documents={STATE: state, MERGE: merge.encode(), **self._beside_state()},
            lock_digest=self._lock_digest,
            name=f"{folder_name(merge.last)}-{suffix}",
        )
        quiet_alone(world)
        return save_checkpoint(
            run.save_folder, contents, world, work_dir=run.work_dir, fence=self.fence
        )

    def _write(self, running: Future[Saved], contents: Contents, known: Mapping[int, Kind]) -> None:
        try:
            running.set_result(self._save(contents, known))
        except BaseException as error:
            self._failed(running, error)

    def _failed(self, running: Future[Saved], error: BaseException) -> None:
        if isinstance(error, (ResourceError, StorageError)):
            self._run.say(
                f"warning: {error}\n  training goes on; the next save is the next try, and no "
                "older checkpoint is removed until then"
            )
        running.set_exception(error)

    def _save(self, contents: Contents, known: Mapping[int, Kind]) -> Saved:
        """Return the folder of the new checkpoint, and the steps of those that went after it."""
        world, step, config = self._saving, contents.step, self.config
        folder = save_checkpoint(
            self._run.save_folder, contents, world, work_dir=self._run.work_dir, fence=self.fence
        )
        gone = removable(
            {**known, step: contents.kind}, step, config.remove, config.max_checkpoints
        )
        if gone:
            try:
                open_checkpoint(folder, world)
            except ValidationError as error:
                raise ResourceError(
                    f"the checkpoint of step {step} was written but does not verify",
                    where=folder,
                    why=error.what,
                    fix="check the disk: it returned other bytes than were written",
                ) from error
            world.on_main(lambda: self._remove(gone))
        return folder, gone

    def _remove(self, steps: list[int]) -> None:
        for step in steps:
            if self.fence is not None:
                self.fence.check()
            remove_checkpoint(self._run.save_folder, step)


def _known(save_folder: str, checkpoint: Checkpoint, names: Sequence[str]) -> dict[int, Kind]:
    """Return the checkpoints up to the one that was loaded; a damaged newer one does not count."""
    known = {}
    for name in names:
        # Older than the good one, and never used:
        with contextlib.suppress(ValidationError, InputError):
            manifest = CheckpointManifest.read(Store(save_folder).child(name))
            if manifest.step <= checkpoint.step:
                known[manifest.step] = manifest.kind
    return known
