"""The checkpoints of a run: saved one at a time, kept as long as they should stay, found again.

    start:  copy the tensors -> write | thread: write -> verify -> remove what may go
    finish: wait -> folder | None: it failed, was said, and the next save is the second try
    newest: clean partial folders -> newest that verifies | none

A save beside the training has a gloo group of its own, so that its exchanges never meet those of
a step. Nothing is removed before the new checkpoint has been read back whole, so whatever becomes
of a save, the last good checkpoint is there.

Never: start a save while one is running, let a rank go on where another one was lost, or go on
after a damaged checkpoint without a word.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from olm_data.errors import (
    ConflictError,
    InputError,
    OlmError,
    ResourceError,
    StorageError,
    ValidationError,
)
from olm_data.storage.lease import Fence
from olm_data.storage.store import Store
from olm_train.checkpoint.load import Checkpoint, newest_checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import Kind, Manifest
from olm_train.checkpoint.place import candidates, remove_checkpoint, remove_partial
from olm_train.checkpoint.policy import CheckpointerConfig, LoadPolicy, LoadStrategy, removable
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.checkpoint.state import HostCopy
from olm_train.distributed.world import World, quiet_alone

Saved = tuple[str, list[int]]
"""Folder of a new checkpoint; steps of the older ones that were removed after it."""


class CheckpointManager:
    """Saves, keeps and finds the checkpoints of a run; every rank makes one and calls it alike.

    Args:
        save_folder: path or URL of the run's checkpoints.
        work_dir: local folder for files on their way to a remote one.
        world: the ranks of the run.
        config: when and how to save.
        say: prints a line, on rank 0.

    Attributes:
        saved: kind of each complete checkpoint by step.
        background: whether saves run beside the training.
        fence: the run's lease on the save folder; None: it is not held.
    """

    def __init__(
        self,
        save_folder: str,
        work_dir: Path,
        world: World,
        config: CheckpointerConfig,
        say: Callable[[str], None],
    ) -> None:
        self.save_folder, self.work_dir, self.config, self.say = save_folder, work_dir, config, say
        self.saved: dict[int, Kind] = {}
        self.fence: Fence | None = None
        default = world.device.type == "cuda"
        self.background = default if config.save_async is None else config.save_async
        self._copy = HostCopy()
        self._running: Future[Saved] | None = None
        self._step, self._kind = 0, Kind.final
        self._world, self._saving = world, world

    def hold(self, fence: Fence) -> None:
        """Begin to save, under a lease; every rank calls it.

        The ranks that save have a group of their own from here on.
        """
        self.fence = fence
        if self._world.size > 1 and self.config.enabled:
            timeout = timedelta(seconds=self.config.save_timeout)
            group = dist.new_group(backend="gloo", timeout=timeout)
            self._saving = replace(self._world, exchange_group=group)

    def newest(self, policy: LoadPolicy) -> Checkpoint | None:
        """Return the checkpoint that the run goes on from, None where it is to begin.

        Partial folders are cleaned. Newer checkpoints that do not verify are passed over, and said.

        Raises:
            ConflictError: there is a checkpoint and the strategy is `never`.
            ValidationError: there are checkpoints but none verifies (`strict`: the newest does
                not), or there is none and the strategy is `always`.
        """
        folder, world = self.save_folder, self._world
        world.on_main(lambda: remove_partial(folder, self.fence))
        found = world.on_main(lambda: candidates(folder))
        if found and policy.strategy is LoadStrategy.never:
            raise ConflictError(
                f"there is a run here already, with the checkpoint {found[0]}",
                where=folder,
                why="load_strategy is `never`: a new run would write over it",
                fix="choose another trainer.save_folder, or remove the old run",
            )
        damaged: list[OlmError] = []
        checkpoint = newest_checkpoint(folder, world, damaged.append)
        for error in damaged:
            self.say(f"warning: {error.what} ({error.where})")
        if checkpoint is not None:
            if damaged and policy.strict:
                raise ValidationError(
                    "the newest checkpoint does not verify",
                    where=folder,
                    why="; ".join(error.what for error in damaged),
                    fix=f"restore it, or go on from step {checkpoint.step:,} without --strict",
                )
            if damaged:
                self.say(f"warning: falling back to the checkpoint of step {checkpoint.step:,}")
            self.saved = world.on_main(lambda: _known(folder, checkpoint))
        elif damaged or (policy.strategy is LoadStrategy.always and policy.path is None):
            raise ValidationError(
                "there is no usable checkpoint",
                where=folder,
                why="; ".join(error.what for error in damaged)
                or "load_strategy is `always` and there is none at all",
                fix="restore one, or start a new run in another trainer.save_folder",
            )
        return checkpoint

    def wants(self, step: int) -> bool:
        """Whether a checkpoint of `step` may be saved: there is none yet, and saving is on."""
        return self.config.enabled and step not in self.saved

    def start(self, make: Callable[[], Contents]) -> None:
        """Save; beside the training, return as soon as the tensors are copied.

        Args:
            make: returns what to save; its tensors may change as soon as this returns. A resource
                or storage error of it is one of the save, on every rank.
        """
        assert self._running is None, "finish the one before"
        quiet_alone(self._saving)
        running: Future[Saved] = Future()
        known = dict(self.saved)
        contents, failure = None, None
        try:
            contents = make()
        except (ResourceError, StorageError) as error:
            failure = error
        failure = next((f for f in self._saving.gather(failure) if f is not None), None)
        self._running = running  # not before: any other error of `make` ends the run at once
        if failure is not None or contents is None:
            assert failure is not None
            self._failed(running, failure)
            return
        self._step, self._kind = contents.step, contents.kind
        if not self.background:
            self._run(running, contents, known)
            return
        assert isinstance(contents.state, Mapping)
        contents = replace(contents, state=self._copy.of(contents.state))
        name = f"checkpoint of step {contents.step}"
        thread = threading.Thread(
            target=self._run, args=(running, contents, known), name=name, daemon=True
        )
        thread.start()

    def finish(self, *, must: bool = False) -> str | None:
        """Wait for the save that is running; return its folder, None if there is none or it failed.

        Args:
            must: raise the error of one that failed; else it was said, and training goes on.

        Raises:
            ResourceError: it takes longer than the timeout, or a rank was lost.
            OlmError: what it failed with, if `must`; a conflict in any case.
        """
        if self._running is None:
            return None
        running, self._running = self._running, None
        try:
            folder, removed = running.result(timeout=self.config.save_timeout)
        except (ResourceError, StorageError):
            if must:
                raise
            return None
        except TimeoutError as error:
            raise ResourceError(
                f"the checkpoint of step {self._step} is not written after "
                f"{self.config.save_timeout:g} seconds",
                where=self.save_folder,
                why="training on would leave the run without a checkpoint",
                fix="see why the disk is slow, or give checkpointer.save_timeout more seconds",
            ) from error
        except RuntimeError as error:
            if self._world.size == 1:
                raise
            # Of the gloo group: the ranks are out of step.
            raise ResourceError(
                f"the ranks lost contact while saving step {self._step}",
                where=self.save_folder,
                why=str(error).strip().partition("\n")[0],
                fix="run the same command again: it goes on from the newest good checkpoint",
            ) from error
        self.saved[self._step] = self._kind
        for step in removed:
            del self.saved[step]
        return folder

    def _run(self, running: Future[Saved], contents: Contents, known: Mapping[int, Kind]) -> None:
        try:
            running.set_result(self._save(contents, known))
        except BaseException as error:
            self._failed(running, error)

    def _failed(self, running: Future[Saved], error: BaseException) -> None:
        if isinstance(error, (ResourceError, StorageError)):
            self.say(
                f"warning: {error}\n  training goes on; the next save is the next try, and no "
                "older checkpoint is removed until then"
            )
        running.set_exception(error)

    def _save(self, contents: Contents, known: Mapping[int, Kind]) -> Saved:
        """Return the folder of the new checkpoint, and the steps of those that went after it."""
        world, step, config = self._saving, contents.step, self.config
        folder = save_checkpoint(
            self.save_folder, contents, world, work_dir=self.work_dir, fence=self.fence
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
            remove_checkpoint(self.save_folder, step)


def _known(save_folder: str, checkpoint: Checkpoint) -> dict[int, Kind]:
    """Return the checkpoints up to the one that was loaded; a damaged newer one does not count."""
    known = {}
    for name in candidates(save_folder):
        # Older than the good one, and never used:
        with contextlib.suppress(ValidationError, InputError):
            manifest = Manifest.read(Store(save_folder).child(name))
            if manifest.step <= checkpoint.step:
                known[manifest.step] = manifest.kind
    return known
