"""Writing a checkpoint: all of it under no name that counts, its manifest last.

    every rank: tensors -> step.tmp/model_and_optim/ (fsync) -> sha256 of the rank's own files
                                                             -> remote: upload, checked on arrival
    rank 0:     JSON files -> the run's logs -> manifest.json -> local: rename step.tmp -> step
                                                              -> `latest`

A kill at any moment leaves either a complete new checkpoint or a partial one that nothing reads;
the checkpoints before it are not touched. An error on one rank is an error on all of them, and
what was written goes at once, so that a full disk has room again.

Never: touch the tensors of a later step; whoever saves beside the training hands in copies.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from olm_data.errors import OlmError, ResourceError
from olm_data.storage.disk import write_durable
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import (
    MANIFEST,
    PARTIAL_SUFFIX,
    TENSORS,
    FileEntry,
    Kind,
    Manifest,
    folder_name,
)
from olm_train.checkpoint.place import sync_folders, write_pointer
from olm_train.world import World

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one checkpoint holds.

    Attributes:
        step: optimiser steps done.
        kind: decides how long it stays.
        tensors: state dict that torch DCP can write, whole or sharded.
        documents: JSON values, or ready bytes, by file name.
        lock_digest: digest of the mixture lock, or "".
        logs: local files of the run that lie beside the checkpoints of a remote save folder.
    """

    step: int
    kind: Kind
    tensors: Mapping[str, Any]
    documents: Mapping[str, Any]
    lock_digest: str
    logs: tuple[Path, ...] = ()


def save_checkpoint(
    save_folder: str | os.PathLike[str], contents: Contents, world: World, *, work_dir: Path
) -> str:
    """Write a checkpoint; every rank calls it. Returns its folder or URL.

    Args:
        save_folder: the run's folder: `s3://...`, or on a file system that all ranks see.
        contents: what to write.
        world: the ranks that write it together; its exchanges go over `world.exchange_group`.
        work_dir: local folder for the files of a remote save folder on their way.

    Raises:
        ResourceError: the disk is full, read-only or fails.
        StorageError: the remote store fails.
        ConflictError: another run has just written this checkpoint of a remote save folder.
    """
    store, name = Store(save_folder), folder_name(contents.step)
    final = store.child(name)
    partial = Path(store.root) / (name + PARTIAL_SUFFIX)
    if store.remote:
        partial = work_dir / (name + PARTIAL_SUFFIX) / f"rank{world.rank}"
    try:
        if store.remote:
            _on_each(world, lambda: _fresh(partial))
            world.on_main(lambda: _clear_remote(final))
        else:
            world.on_main(lambda: _fresh(partial))
        _write_tensors(partial, contents.tensors, world)
        parts = _on_each(world, lambda: _own_files(partial, world, final))
        entries = [entry for part in parts for entry in part]
        world.on_main(lambda: _finish(partial, final, entries, contents))
        world.on_main(lambda: write_pointer(store.root, contents.step))
    except (OSError, CheckpointException) as error:
        raise ResourceError(
            f"the checkpoint of step {contents.step} could not be written",
            where=store.root,
            why=_reason(error),
            fix="make room or see to the permissions there",
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


def _clear_remote(final: Store) -> None:
    """Remove what lies there: a part, or a damaged one, else the run had gone on from it."""
    final.delete(MANIFEST)
    final.clear()


def _write_tensors(partial: Path, tensors: Mapping[str, Any], world: World) -> None:
    dcp.save(
        dict(tensors),
        storage_writer=dcp.FileSystemWriter(partial / TENSORS, sync_files=True),
        process_group=world.exchange_group,
        no_dist=world.size == 1,
    )


def _own_files(partial: Path, world: World, final: Store) -> list[FileEntry]:
    """Measure the files of this rank, and bring them to a remote store."""
    patterns = [f"__{world.rank}_*.distcp"] + [".metadata"] * world.main
    names = [
        f"{TENSORS}/{path.name}"
        for pattern in patterns
        for path in sorted((partial / TENSORS).glob(pattern))
    ]
    return [_measured(partial, name, final) for name in names]


def _measured(partial: Path, name: str, final: Store) -> FileEntry:
    entry = FileEntry.of(partial, name)
    if final.remote:
        final.publish(name, partial / name, entry.sha256)
    return entry


def _finish(partial: Path, final: Store, entries: list[FileEntry], contents: Contents) -> None:
    for name, value in contents.documents.items():
        data = value if isinstance(value, bytes) else json.dumps(value, indent=1).encode() + b"\n"
        write_durable(partial / name, data)
        entries.append(_measured(partial, name, final))
    manifest = Manifest(contents.step, contents.kind, contents.lock_digest, tuple(entries))
    if final.remote:
        for log in contents.logs:
            Store(os.path.dirname(final.root)).put(log.name, log.read_bytes())
        final.create(MANIFEST, manifest.to_json())
        return
    sync_folders([partial / TENSORS, partial])
    write_durable(partial / MANIFEST, manifest.to_json())
    sync_folders([partial])
    if os.path.exists(final.root):  # damaged, else the run had gone on from it
        shutil.rmtree(final.root)
    os.rename(partial, final.root)
    sync_folders([partial.parent])


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
