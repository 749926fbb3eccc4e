"""Writing a checkpoint: all of it under a temporary name, its manifest last, then one rename.

    every rank: tensors -> step.tmp/model_and_optim/ (fsync) -> sha256 of the rank's own files
    rank 0:     JSON files (fsync) -> manifest.json (fsync) -> rename step.tmp -> step -> `latest`

A kill at any moment leaves either a complete new checkpoint or a `.tmp` folder that nothing reads;
the checkpoints before it are not touched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from olm_data.errors import ResourceError
from olm_train.checkpoint.manifest import (
    MANIFEST,
    PARTIAL_SUFFIX,
    TENSORS,
    FileEntry,
    Kind,
    Manifest,
    folder_name,
    sync_folders,
    write_durably,
    write_pointer,
)
from olm_train.world import World, quiet_alone


def save_checkpoint(
    save_folder: Path,
    *,
    step: int,
    kind: Kind,
    tensors: dict[str, Any],
    documents: Mapping[str, Any],
    lock_digest: str,
    world: World,
) -> Path:
    """Write the checkpoint of `step`; every rank calls it. Returns its folder.

    Args:
        save_folder: the run's folder, on a file system that all ranks see.
        step: optimiser steps done.
        kind: decides how long it stays.
        tensors: state dict that torch DCP can write, whole or sharded.
        documents: JSON values, or ready bytes, by file name.
        lock_digest: digest of the mixture lock, or "".
        world: the ranks that write it together.

    Raises:
        ResourceError: the disk is full, read-only or fails.
    """
    final = save_folder / folder_name(step)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    try:
        world.on_main(lambda: _fresh(partial))
        writer = dcp.FileSystemWriter(partial / TENSORS, sync_files=True)
        with quiet_alone(world):
            dcp.save(
                tensors,
                storage_writer=writer,
                process_group=world.exchange_group,
                no_dist=world.size == 1,
            )
        entries = [entry for part in world.gather(_own_files(partial, world)) for entry in part]
        world.on_main(lambda: _finish(partial, final, entries, step, kind, documents, lock_digest))
    except (OSError, CheckpointException) as error:
        raise ResourceError(
            f"the checkpoint of step {step} could not be written",
            where=str(save_folder),
            why=_reason(error),
            fix="free space or permissions, then run the same command again: "
            "it goes on from the checkpoint before",
        ) from error
    return final


def _fresh(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    (partial / TENSORS).mkdir(parents=True)


def _own_files(partial: Path, world: World) -> list[FileEntry]:
    patterns = [f"__{world.rank}_*.distcp"] + [".metadata"] * world.main
    return [
        FileEntry.of(partial, f"{TENSORS}/{path.name}")
        for pattern in patterns
        for path in sorted((partial / TENSORS).glob(pattern))
    ]


def _finish(
    partial: Path,
    final: Path,
    entries: list[FileEntry],
    step: int,
    kind: Kind,
    documents: Mapping[str, Any],
    lock_digest: str,
) -> None:
    for name, value in documents.items():
        data = value if isinstance(value, bytes) else json.dumps(value, indent=1).encode() + b"\n"
        write_durably(partial / name, data)
        entries.append(FileEntry.of(partial, name))
    sync_folders([partial / TENSORS, partial])
    manifest = Manifest(step, kind, lock_digest, tuple(entries))
    write_durably(partial / MANIFEST, manifest.to_json())
    sync_folders([partial])
    if final.exists():  # damaged, else the run had gone on from it
        shutil.rmtree(final)
    os.rename(partial, final)
    sync_folders([final.parent])
    write_pointer(final.parent, step)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {failure}"
    return str(error)
