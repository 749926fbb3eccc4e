"""Where a run's checkpoints lie: names, what a kill left, removal, the pointer; local or remote.

    local:   step00000100-000007.tmp/ -> fsync -> rename -> step00000100/   removal: the way back
    remote:  step00000100/lease-000007/* -> .../manifest.json, created last removal: manifest first

A remote store has no rename: there a folder without a manifest is a partial one. The number is that
of the writer's lease: what a later holder is writing is never removed by an earlier one.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from olm_data.errors import InputError, OlmError, ValidationError, typed
from olm_data.kinds import nearest
from olm_data.storage.disk import io_errors
from olm_data.storage.lease import Fence
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import (
    MANIFEST,
    PARTIAL_SUFFIX,
    POINTER,
    fence_of_file,
    fence_of_partial,
    folder_name,
    step_of,
)

MAX_POINTER = 1024
"""Bytes of `latest` that are read."""

_COMPLETE = re.compile(r"step\d{8,}(?:-[a-z][a-z0-9_]*)?")


def candidates(save_folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the folders named like checkpoints, newest step first; none is checked.

    A run's folder, or `s3://...`; one that does not exist has none.
    """
    return sorted(
        (name for name in _folders(Store(save_folder)) if step_of(name) is not None),
        key=lambda name: -(step_of(name) or 0),
    )


def no_checkpoint(place: str) -> InputError:
    """Return the error that there is no checkpoint to read at `place`: a typing error, a folder
    of runs, a run that saved none, or one whose checkpoints are all damaged."""
    fix = "give the folder of a checkpoint, or the trainer.save_folder of a run that saved one"
    store = Store(place)
    if not store.remote and not os.path.lexists(store.root):
        return InputError("there is no such folder", where=place, fix=nearest(store.root, fix))
    if candidates(place):
        return InputError("there is no checkpoint that verifies", where=place, fix=fix)
    runs = [] if store.remote else sorted(path.parent for path in Path(store.root).glob("*/step*/"))
    if runs:
        names = ", ".join(typed(str(run)) for run in dict.fromkeys(runs))
        fix = f"name one of the runs in it: {names}"
    return InputError("there is no checkpoint in this folder", where=place, fix=fix)


def complete_folders(save_folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the folders of whole checkpoints, by step, averaged weights among them.

    Whole: the manifest, which is written last, is there; no file is checked.
    """
    found = _folders(Store(save_folder))
    return sorted(name for name, whole in found.items() if whole and _COMPLETE.fullmatch(name))


def partial_folders(save_folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the folders that a killed save or removal left."""
    store = Store(save_folder)
    if store.remote:
        found = _folders(store)
        return sorted(name for name in found if step_of(name) is not None and not found[name])
    return sorted(name for name in _folders(store) if fence_of_partial(name) is not None)


def remove_partial(save_folder: str | os.PathLike[str], fence: Fence | None = None) -> list[str]:
    """Remove what killed saves and removals left; return the names.

    Args:
        fence: lease of the run; what later holders write stays. None: everything goes.

    Raises:
        LeaseLostError: the lease was taken over.
    """
    store, found = Store(save_folder), partial_folders(save_folder)
    if found and fence is not None:
        fence.check()
    for name in found:
        if store.remote:
            clear_files(store.child(name), fence)
        elif fence is None or (fence_of_partial(name) or 0) <= fence.number:
            with io_errors(store.url(name), writing=True):
                shutil.rmtree(store.url(name))
    return found


def clear_files(checkpoint: Store, fence: Fence | None) -> None:
    """Remove the files of a remote checkpoint without a manifest, but not those of later leases."""
    for entry in checkpoint.entries():
        if fence is None or fence_of_file(entry.name) <= fence.number:
            checkpoint.delete(entry.name)


def remove_checkpoint(save_folder: str | os.PathLike[str], step: int) -> None:
    """Remove a checkpoint; it stops being one before its first file goes."""
    store, name = Store(save_folder), folder_name(step)
    if store.remote:
        checkpoint = store.child(name)
        checkpoint.delete(MANIFEST)
        checkpoint.clear()
        return
    with io_errors(store.url(name), writing=True):
        partial = store.url(name + PARTIAL_SUFFIX)
        os.rename(store.url(name), partial)
        shutil.rmtree(partial)


def write_pointer(save_folder: Store, step: int) -> None:
    """Let `latest` name the checkpoint of `step`, atomically."""
    save_folder.put(POINTER, folder_name(step).encode() + b"\n")


def lost_checkpoint(save_folder: Store, found: list[str]) -> list[OlmError]:
    """Return the error that the checkpoint which `latest` names is gone; none if it is among
    `found`, or nothing is named.

    A run writes the pointer after the checkpoint, and never removes the newest one.
    """
    try:
        name = save_folder.read(POINTER, limit=MAX_POINTER).decode("ascii", "replace").strip()
    except (FileNotFoundError, InputError, ValidationError):
        return []
    if step_of(name) is None or name in found:
        return []
    return [
        InputError(f"the checkpoint {name} that `{POINTER}` names is gone", where=save_folder.root)
    ]


def _folders(store: Store) -> dict[str, bool]:
    """The folders right in a run's folder, and whether each has a manifest."""
    if store.remote:
        found: dict[str, bool] = {}
        for entry in store.entries():
            name, slash, rest = entry.name.partition("/")
            if slash:
                found[name] = found.get(name, False) or rest == MANIFEST
        return found
    root = Path(store.root)
    if not root.is_dir():
        return {}
    with io_errors(store.root):
        return {path.name: (path / MANIFEST).is_file() for path in root.iterdir() if path.is_dir()}
