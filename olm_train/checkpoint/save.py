"""Writing a checkpoint: all of it under no name that counts, its manifest last.

    every rank: tensors -> step-N.tmp/model_and_optim/ (fsync) -> sha256 of the rank's own file
                                                               -> remote: upload to step/lease-N/
    rank 0:     JSON files -> the run's logs -> manifest.json -> local: rename step-N.tmp -> step
                lease N still ours? before each of these      -> `latest`

A kill at any moment leaves either a complete new checkpoint or a partial one that nothing reads;
the checkpoints before it are not touched. An error on one rank is an error on all of them, and what
was written goes at once, so that a full disk has room again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from olm_data.errors import ConflictError, InputError, OlmError, ResourceError, ValidationError
from olm_data.regular_files import MAX_DOCUMENT
from olm_data.storage.disk import fsync_path, room_left, write_durable
from olm_data.storage.lease import Fence
from olm_data.storage.store import Store, create_json
from olm_train.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST,
    MERGE,
    TENSORS,
    CheckpointManifest,
    FileEntry,
    Kind,
    MisnamedError,
    OtherVersionError,
    clear_files,
    files_folder,
    folder_name,
    partial_name,
    write_pointer,
)
from olm_train.checkpoint.state import StateDict, flatten, split
from olm_train.checkpoint.tensors import IndexedWriter, tensors_file
from olm_train.distributed.world import World
from olm_train.model.shards import shown_by_block


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one checkpoint holds.

    Attributes:
        step: optimiser steps done.
        kind: decides how long it stays.
        state: nested state of tensors, whole or sharded, and plain values; or what writes its
            files and their index into a folder.
        documents: bytes by file name.
        lock_digest: digest of the mixture lock, or "".
        logs: local files of the run that lie beside the checkpoints of a remote save folder.
        name: of its folder, where that is not one of those that a run goes on from; `latest` never
            names it. None: `step00000100`.
    """

    step: int
    kind: Kind
    state: StateDict | Callable[[Path], None]
    documents: Mapping[str, bytes]
    lock_digest: str
    logs: tuple[Path, ...] = ()
    name: str | None = None

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return self.name or folder_name(self.step)


def save_checkpoint(
    save_folder: str | os.PathLike[str],
    contents: Contents,
    world: World,
    *,
    work_dir: Path,
    fence: Fence | None = None,
) -> str:
    """Write a checkpoint; every rank calls it. Returns its folder or URL.

    Args:
        save_folder: the run's folder: `s3://...`, or on a file system that all ranks see.
        contents: what to write.
        world: the ranks that write it together; its exchanges go over `world.exchange_group`.
        work_dir: local folder for the files of a remote save folder on their way.
        fence: the run's lease on the save folder; None: nobody else writes there.

    Raises:
        ResourceError: the disk is full, read-only or fails.
        StorageError: the remote store fails.
        ConflictError: the lease is lost, or a checkpoint of this step that verifies is there.
    """
    return _Save(save_folder, contents, world, work_dir, fence).run()


class _Save:
    """One checkpoint on its way, on one rank."""

    def __init__(
        self,
        save_folder: str | os.PathLike[str],
        contents: Contents,
        world: World,
        work_dir: Path,
        fence: Fence | None,
    ) -> None:
        self.contents, self.world, self.fence = contents, world, fence
        self.number = 0 if fence is None else fence.number
        single_writer = fence is not None and fence.store.single_writer
        self.store = Store(save_folder, single_writer=single_writer)
        self.final = self.store.child(contents.folder)
        self.folder, passing = "", partial_name(contents.folder, self.number)
        self.partial = Path(self.store.root) / passing
        if self.store.remote:
            self.folder = files_folder(self.number)
            self.partial = work_dir / passing / f"rank{world.rank}"
        self.files = self.final.child(self.folder) if self.folder else self.final

    def run(self) -> str:
        world, remote = self.world, self.store.remote
        if world.on_main(self._is_there):
            world.on_main(self._point)
            return self.final.root
        try:
            if remote:
                world.on_each(self._make_room)
            else:
                world.on_main(self._make_room)
            self._write_state()
            parts = world.on_each(self._own_files)
            entries = [entry for part in parts for entry in part]
            world.on_main(lambda: self._finish(entries))
            world.on_main(self._point)
        except (OSError, CheckpointException) as error:
            for failure, _ in getattr(error, "failures", {}).values():
                if isinstance(failure, OlmError):
                    raise failure from error
            raise ResourceError(
                f"the checkpoint of step {self.contents.step} could not be written",
                where=self.store.root,
                why=_reason(error, self.store),
                fix="free some space or correct the permissions there",
            ) from error
        finally:
            # Of a local one only rank 0 knows when all have stopped writing: it left the exchange
            # last.
            if remote or world.main:
                shutil.rmtree(self.partial, ignore_errors=True)
            if remote:
                with contextlib.suppress(OSError):  # other ranks of this machine may still be there
                    self.partial.parent.rmdir()
        return self.final.root

    def _check_lease(self) -> None:
        if self.fence is not None:
            self.fence.check()

    def _is_there(self) -> bool:
        """Whether this run has written this very checkpoint; one that is damaged is made way for.

        Raises:
            ConflictError: another run has, or a newer program, or it is of another step.
        """
        final = self.final
        try:
            there = _intact(final)
        except (OtherVersionError, InputError) as error:
            raise ConflictError(
                "a checkpoint of another version is there already",
                where=final.root,
                why=error.what,
                fix="go on with the program that wrote it, or choose another trainer.save_folder",
            ) from error
        except MisnamedError as error:
            raise ConflictError(
                "the checkpoint of another step lies where this one belongs",
                where=final.root,
                why=error.what,
                fix=f"{error.fix}; then run the same command again",
            ) from error
        if there is not None:
            if self.contents.name:
                return self._is_same(there)
            if self.number and there.fence == self.number:  # what came after its manifest failed
                return True
            raise _taken(final, there.fence)
        if final.remote:
            self._check_lease()
            final.delete(MANIFEST)
            clear_files(final, self.fence)
        return False

    def _is_same(self, there: CheckpointManifest) -> bool:
        """Whether the merge that is there is this one, of this run or of one before it: steps
        repeated after a kill lead to it.

        Raises:
            ConflictError: it is another one.
        """
        wanted = hashlib.sha256(self.contents.documents[MERGE]).hexdigest()
        if wanted in [entry.sha256 for entry in there.files if entry.name == MERGE]:
            return True
        raise ConflictError(
            "another checkpoint is there already",
            where=self.final.root,
            why="what verifies is never replaced",
            fix="move it away, or choose another name",
        )

    def _make_room(self) -> None:
        if self.partial.exists():
            shutil.rmtree(self.partial)
        (self.partial / TENSORS).mkdir(parents=True)

    def _write_state(self) -> None:
        world, state = self.world, self.contents.state
        if not isinstance(state, Mapping):
            state(self.partial / TENSORS)
            return
        tensors, values = split(flatten(state))
        if world.stages > 1:  # each rank has those of its stages
            by_rank = world.gather(values)
            values = {name: value for each in reversed(by_rank) for name, value in each.items()}
        dcp.save(
            {name: shown_by_block(tensor) for name, tensor in tensors.items()},
            storage_writer=IndexedWriter(self.partial / TENSORS, world.rank, values),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
            process_group=world.exchange_group,
            no_dist=world.size == 1,
        )

    def _own_files(self) -> list[FileEntry]:
        names = [tensors_file(self.world.rank), *([INDEX_NAME] * self.world.main)]
        there = [name for name in names if (self.partial / TENSORS / name).exists()]
        return [self._measured(f"{TENSORS}/{name}") for name in there]

    def _measured(self, name: str) -> FileEntry:
        """Measure a file, and bring it to a remote store."""
        entry = FileEntry.of(self.partial, name)
        if self.final.remote:
            self.files.publish(name, self.partial / name, entry.sha256)
        return entry

    def _finish(self, entries: list[FileEntry]) -> None:
        contents, final, partial = self.contents, self.final, self.partial
        self._check_lease()
        for name, data in contents.documents.items():
            write_durable(partial / name, data)
            entries.append(self._measured(name))
        manifest = CheckpointManifest(
            contents.step,
            contents.kind,
            contents.lock_digest,
            tuple(entries),
            fence=self.number,
            folder=self.folder,
        )
        self._check_lease()
        if final.remote:
            for log in contents.logs:
                self.store.put(log.name, log.read_bytes(), limit=MAX_DOCUMENT)
            self._check_lease()
            create_json(final, MANIFEST, manifest.encode())
            return
        fsync_path(partial / TENSORS)
        fsync_path(partial)
        write_durable(partial / MANIFEST, manifest.encode())
        fsync_path(partial)
        self._check_lease()
        if os.path.exists(final.root):
            self._remove_damaged()
        try:
            os.rename(partial, final.root)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise _taken(final, 0) from error
            raise
        fsync_path(partial.parent)

    def _remove_damaged(self) -> None:
        """Remove a checkpoint that does not verify: moved aside first, and looked at once more."""
        final = self.final.root
        aside = self.store.url(partial_name(self.contents.folder, self.number, old=True))
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
        there = _intact(Store(aside))
        if there is not None:
            os.rename(aside, final)
            raise _taken(self.final, there.fence)
        shutil.rmtree(aside)

    def _point(self) -> None:
        if self.contents.name:
            return
        self._check_lease()
        write_pointer(self.store, self.contents.step)


def _intact(checkpoint: Store) -> CheckpointManifest | None:
    """Return the manifest of a checkpoint that verifies, None where there is none.

    Raises:
        OtherVersionError, InputError: it is of another version.
        MisnamedError: the folder has the name of another step.
    """
    try:
        there = CheckpointManifest.read(checkpoint)
    except (OtherVersionError, MisnamedError):
        raise
    except ValidationError:
        return None
    return None if there.problems(checkpoint) else there


def _taken(final: Store, number: int) -> ConflictError:
    return ConflictError(
        "a checkpoint of this step that verifies is there already",
        where=final.root,
        why=f"another run wrote it under lease {number}, and what verifies is never replaced",
        fix="run the same command again: it goes on from the newest checkpoint",
    )


def _reason(error: BaseException, store: Store) -> str:
    reason, failure = str(error), error
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        reason = f"rank {rank}: {failure}"
    full = getattr(failure, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    left = room_left(store.root) if full and not store.remote else ""
    return f"{reason}; {left}" if left else reason
