"""Writing a checkpoint: all of it under no name that counts, its manifest last.

    every rank: tensors -> step-N.tmp/model_and_optim/ (fsync) -> sha256 of the rank's own file
                                                               -> remote: upload to step/lease-N/
    rank 0:     JSON files -> the run's logs -> manifest.json -> local: rename step-N.tmp -> step
                lease N still ours? before each of these      -> `latest`

A kill at any moment leaves either a complete new checkpoint or a partial one that nothing reads;
the checkpoints before it are not touched. An error on one rank is an error on all of them, and
what was written goes at once, so that a full disk has room again.

Never: touch the tensors of a later step (whoever saves beside the training hands in copies), or
replace a checkpoint that verifies.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from olm_data.errors import ConflictError, InputError, OlmError, ResourceError, ValidationError
from olm_data.storage.disk import write_durable
from olm_data.storage.lease import Fence
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST,
    TENSORS,
    FileEntry,
    Kind,
    Manifest,
    MisnamedError,
    OtherVersionError,
    files_folder,
    folder_name,
    partial_name,
)
from olm_train.checkpoint.place import clear_files, sync_folders, write_pointer
from olm_train.checkpoint.state import flatten, split
from olm_train.checkpoint.writer import IndexedWriter, tensors_file
from olm_train.distributed.world import World

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one checkpoint holds.

    Attributes:
        step: optimiser steps done.
        kind: decides how long it stays.
        state: nested state of tensors, whole or sharded, and plain values; or what writes its
            files and their index into a folder.
        documents: JSON values, or ready bytes, by file name.
        lock_digest: digest of the mixture lock, or "".
        logs: local files of the run that lie beside the checkpoints of a remote save folder.
    """

    step: int
    kind: Kind
    state: Mapping[str, Any] | Callable[[Path], None]
    documents: Mapping[str, Any]
    lock_digest: str
    logs: tuple[Path, ...] = ()


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
    store = Store(save_folder, single_writer=fence is not None and fence.store.single_writer)
    number = 0 if fence is None else fence.number
    final, passing = store.child(folder_name(contents.step)), partial_name(contents.step, number)
    partial = Path(store.root) / passing
    files = final
    if store.remote:
        partial = work_dir / passing / f"rank{world.rank}"
        files = final.child(files_folder(number)) if number else final
    if world.on_main(lambda: _is_there(final, fence)):
        world.on_main(lambda: _point(store, contents.step, fence))
        return final.root
    try:
        if store.remote:
            _on_each(world, lambda: _fresh(partial))
        else:
            world.on_main(lambda: _fresh(partial))
        _write_state(partial, contents.state, world)
        parts = _on_each(world, lambda: _own_files(partial, world, files))
        entries = [entry for part in parts for entry in part]
        world.on_main(lambda: _finish(partial, final, files, entries, contents, fence))
        world.on_main(lambda: _point(store, contents.step, fence))
    except (OSError, CheckpointException) as error:
        for failure, _ in getattr(error, "failures", {}).values():
            if isinstance(failure, OlmError):
                raise failure from error
        raise ResourceError(
            f"the checkpoint of step {contents.step} could not be written",
            where=store.root,
            why=_reason(error),
            fix="free some space or correct the permissions there",
        ) from error
    finally:
        # Of a local one only rank 0 knows when all have stopped writing: it left the exchange last.
        if store.remote or world.main:
            shutil.rmtree(partial, ignore_errors=True)
        if store.remote:
            with contextlib.suppress(OSError):  # other ranks of this machine may still be there
                partial.parent.rmdir()
    return final.root


def _fresh(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    (partial / TENSORS).mkdir(parents=True)


def _is_there(final: Store, fence: Fence | None) -> bool:
    """Whether this run has written this very checkpoint; one that is damaged is made way for.

    Raises:
        ConflictError: another run has, or a newer program, or it is of another step.
    """
    number = 0 if fence is None else fence.number
    try:
        there = Manifest.read(final)
        damaged = bool(there.problems(final))
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
    except ValidationError:
        damaged = True
    if not damaged:
        if number and there.fence == number:  # what came after its manifest had failed
            return True
        raise _taken(final, there.fence)
    if final.remote:
        if fence is not None:
            fence.check()
        final.delete(MANIFEST)
        clear_files(final, fence)
    return False


def _taken(final: Store, number: int) -> ConflictError:
    return ConflictError(
        "a checkpoint of this step that verifies is there already",
        where=final.root,
        why=f"another run wrote it under lease {number}, and what verifies is never replaced",
        fix="run the same command again: it goes on from the newest checkpoint",
    )


def _write_state(
    partial: Path, state: Mapping[str, Any] | Callable[[Path], None], world: World
) -> None:
    if not isinstance(state, Mapping):
        state(partial / TENSORS)
        return
    tensors, values = split(flatten(state))
    dcp.save(
        tensors,
        storage_writer=IndexedWriter(partial / TENSORS, world.rank, values),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
        process_group=world.exchange_group,
        no_dist=world.size == 1,
    )


def _own_files(partial: Path, world: World, final: Store) -> list[FileEntry]:
    """Measure the files of this rank, and bring them to a remote store."""
    names = [tensors_file(world.rank), *([INDEX_NAME] * world.main)]
    return [
        _measured(partial, f"{TENSORS}/{name}", final)
        for name in names
        if (partial / TENSORS / name).exists()
    ]


def _measured(partial: Path, name: str, final: Store) -> FileEntry:
    entry = FileEntry.of(partial, name)
    if final.remote:
        final.publish(name, partial / name, entry.sha256)
    return entry


def _finish(
    partial: Path,
    final: Store,
    files: Store,
    entries: list[FileEntry],
    contents: Contents,
    fence: Fence | None,
) -> None:
    if fence is not None:
        fence.check()
    for name, value in contents.documents.items():
        data = value if isinstance(value, bytes) else json.dumps(value, indent=1).encode() + b"\n"
        write_durable(partial / name, data)
        entries.append(_measured(partial, name, files))
    number = 0 if fence is None else fence.number
    manifest = Manifest(
        contents.step,
        contents.kind,
        contents.lock_digest,
        tuple(entries),
        fence=number,
        folder=files.root.removeprefix(final.root).strip("/"),
    )
    if fence is not None:
        fence.check()
    if final.remote:
        for log in contents.logs:
            Store(os.path.dirname(final.root)).put(log.name, log.read_bytes())
        if fence is not None:
            fence.check()
        final.create(MANIFEST, manifest.encode())
        return
    sync_folders([partial / TENSORS, partial])
    write_durable(partial / MANIFEST, manifest.encode())
    sync_folders([partial])
    if fence is not None:
        fence.check()
    if os.path.exists(final.root):
        _remove_damaged(final, partial.with_name(partial_name(contents.step, number, old=True)))
    try:
        os.rename(partial, final.root)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _taken(final, 0) from error
        raise
    sync_folders([partial.parent])


def _remove_damaged(final: Store, aside: Path) -> None:
    """Remove a checkpoint that does not verify: moved aside first, and looked at once more."""
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(final.root, aside)
    moved = Store(str(aside))
    try:
        there = Manifest.read(moved)
        damaged = bool(there.problems(moved))
    except ValidationError:
        damaged = True
    if not damaged:
        os.rename(aside, final.root)
        raise _taken(final, there.fence)
    shutil.rmtree(aside)


def _point(store: Store, step: int, fence: Fence | None) -> None:
    if fence is not None:
        fence.check()
    write_pointer(store.root, step)


def _on_each(world: World, action: Callable[[], Result]) -> list[Result]:
    """Run `action` on every rank; return the results by rank, or raise the first error on all."""
    result: Result | None = None
    failure: Exception | None = None
    try:
        result = action()
    except (OlmError, OSError) as error:
        failure = error
    outcomes = world.gather((result, failure))
    for _, failed in outcomes:
        if failed is not None:
            raise failed
    return [result for result, _ in outcomes]


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {failure}"
    return str(error)
