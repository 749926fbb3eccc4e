"""One save at a time, beside the training or not, and what follows it: removal, or a second try.

    start: wait for the one before -> copy the tensors -> write | thread: write -> verify -> remove
    finish: wait -> Saved | None: it failed, was said, and the next save is the second try

A save beside the training has a gloo group of its own, so that its exchanges never meet those of
a step. Nothing is removed before the new checkpoint has been read back whole, so whatever becomes
of a save, the last good checkpoint is there.

Never: start a save while one is running, or let a rank go on where another one was lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from olm_data.errors import ResourceError, StorageError, ValidationError
from olm_data.storage.lease import Fence
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.place import remove_checkpoint
from olm_train.checkpoint.retention import Removal, removable
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.checkpoint.stage import Stage
from olm_train.distributed.world import World, quiet_alone


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """How checkpoints are saved.

    Attributes:
        background: write beside the training.
        timeout: seconds after which a save that is not finished ends the run.
        remove: rule of removal.
        keep: permanent checkpoints that stay; None: all.
    """

    background: bool
    timeout: float
    remove: Removal
    keep: int | None


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete.

    Attributes:
        step, kind: as in its manifest.
        folder: path or URL.
        removed: steps whose checkpoints went after it.
    """

    step: int
    kind: Kind
    folder: str
    removed: tuple[int, ...]


class Saver:
    """Saves the checkpoints of a run; every rank makes one and calls it alike.

    Args:
        save_folder: path or URL of the run's checkpoints.
        work_dir: local folder for files on their way to a remote one.
        world: the ranks of the run.
        policy: how to save.
        say: prints a line, on rank 0.
        fence: the run's lease on the save folder.
    """

    def __init__(
        self,
        save_folder: str,
        work_dir: Path,
        world: World,
        policy: SavePolicy,
        say: Callable[[str], None],
        fence: Fence | None = None,
    ) -> None:
        self._fence = fence
        self.save_folder, self.work_dir, self.policy, self.say = save_folder, work_dir, policy, say
        self._stage = Stage()
        self._running: Future[Saved] | None = None
        self._step = 0
        self._world = world
        if world.size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=policy.timeout))
            self._world = replace(world, exchange_group=group)

    def start(self, make: Callable[[], Contents], known: Mapping[int, Kind]) -> None:
        """Save; with `background` return as soon as the tensors are copied.

        Args:
            make: returns what to save; its tensors may change as soon as this returns. A resource
                or storage error of it is one of the save, on every rank.
            known: kind of each complete checkpoint by step.
        """
        assert self._running is None, "finish the one before"
        quiet_alone(self._world)
        running: Future[Saved] = Future()
        known = dict(known)
        contents, failure = None, None
        try:
            contents = make()
        except (ResourceError, StorageError) as error:
            failure = error
        failure = next((f for f in self._world.gather(failure) if f is not None), None)
        self._running = running  # not before: any other error of `make` ends the run at once
        if failure is not None or contents is None:
            assert failure is not None
            self._failed(running, failure)
            return
        self._step = contents.step
        if not self.policy.background:
            self._run(running, contents, known)
            return
        assert isinstance(contents.state, Mapping)
        contents = replace(contents, state=self._stage.copy(contents.state))
        name = f"checkpoint of step {contents.step}"
        thread = threading.Thread(
            target=self._run, args=(running, contents, known), name=name, daemon=True
        )
        thread.start()

    def finish(self, *, must: bool = False) -> Saved | None:
        """Wait for the save that is running; None if there is none, or if it failed.

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
            return running.result(timeout=self.policy.timeout)
        except (ResourceError, StorageError):
            if must:
                raise
            return None
        except TimeoutError as error:
            raise ResourceError(
                f"the checkpoint of step {self._step} is not written after "
                f"{self.policy.timeout:g} seconds",
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
        world, step = self._world, contents.step
        folder = save_checkpoint(
            self.save_folder, contents, world, work_dir=self.work_dir, fence=self._fence
        )
        gone = removable({**known, step: contents.kind}, step, self.policy.remove, self.policy.keep)
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
        return Saved(step, contents.kind, folder, tuple(gone))

    def _remove(self, steps: list[int]) -> None:
        for step in steps:
            if self._fence is not None:
                self._fence.check()
            remove_checkpoint(self.save_folder, step)
