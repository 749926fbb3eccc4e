"""The checkpoint format, version 3: names, and the manifest that makes a checkpoint one.

    <save_folder>/               a local path or s3://bucket/prefix
      latest                     name of the newest checkpoint; a convenience, never trusted
      step00000100/
        model_and_optim/         index.json (`tensors.py`), rank00000.safetensors, ...
        train.json               step, loader state, callbacks' state, world size, origin
        config.json              resolved configuration of the run
        mixture.lock.json        copy of the lock
        tokenizer.json           copy of that of the data, if it has one
        merge.json               of merged weights only: what they are the mean of (`merged.py`)
        ...                      what callbacks add, by names of their own
        manifest.json            sizes and sha256 of all the above; written last
      step00000100-merged/       merged weights, without an optimiser; no run goes on from them
      step00000150-000007.tmp/   being written under lease 7, or left by a kill: never read, cleaned

A folder is a checkpoint if its manifest lists exactly what `model_and_optim/` holds and every
listed file has its size and sha256. None of the files is a pickle, and none names a place outside.
docs/reference/checkpoint.md is the specification.

A remote store has no rename: there all files but the manifest lie in step00000100/lease-000007/, so
that a writer which was taken over (`olm_data.storage.lease`) never touches those of the next one.

Versions 1 and 2, of before the first release, are refused like any other.

How a checkpoint comes to be and is removed in a folder, and in a remote store:

    local:   step00000100-000007.tmp/ -> fsync -> rename -> step00000100/   removal: the way back
    remote:  step00000100/lease-000007/* -> .../manifest.json, created last removal: manifest first

A remote store has no rename: there a folder without a manifest is a partial one. The number is that
of the writer's lease: what a later holder is writing is never removed by an earlier one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode_object, sha256_file
from olm_data.bounded_json import digest as canonical_digest
from olm_data.decoding import convert
from olm_data.errors import InputError, OlmError, ResourceError, ValidationError, printable, typed
from olm_data.path_kinds import nearest
from olm_data.storage.disk import io_errors
from olm_data.storage.lease import Fence
from olm_data.storage.store import Store, read_json

FORMAT, VERSION = "olm-checkpoint", 3
MANIFEST, TENSORS, STATE, CONFIG, LOCK, TOKENIZER, MERGE = (
    "manifest.json",
    "model_and_optim",
    "train.json",
    "config.json",
    "mixture.lock.json",
    "tokenizer.json",
    "merge.json",
)
INDEX_NAME = "index.json"
INDEX = f"{TENSORS}/{INDEX_NAME}"
POINTER = "latest"
PARTIAL_SUFFIX = ".tmp"

DOCUMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""Names of files beside those above, see `Callback.documents`."""
_PARTIAL = re.compile(r"step\d{8,}(?:-[a-z][a-z0-9_]*)??(?:-(\d{6,}))?(?:-old)?\.tmp")
_FOLDER = re.compile(r"|lease-(\d{6,})")
_NAME = re.compile(r"step(\d{8,})")
_FILE = re.compile(r"(?:model_and_optim/)?[A-Za-z0-9_.][A-Za-z0-9_.-]*")


class Kind(StrEnum):
    """Why a checkpoint was written, which decides how long it stays."""

    permanent = "permanent"
    """At `save_interval`: removed only by `max_checkpoints`."""
    fixed = "fixed"
    """At `fixed_steps`, or before training: never removed."""
    ephemeral = "ephemeral"
    """At `ephemeral_save_interval`, or on preemption: removed after the next one is complete."""
    final = "final"
    """At the end of a run."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint.

    Attributes:
        name: path inside the checkpoint, with `/`.
        bytes: exact size.
        sha256: of its bytes.
    """

    name: str
    bytes: Size
    sha256: str

    @classmethod
    def of(cls, folder: Path, name: str) -> FileEntry:
        """Measure a local file."""
        path = folder / name
        return cls(name, path.stat().st_size, sha256_file(path))


class CheckpointManifest(msgspec.Struct, frozen=True):
    """The content of `manifest.json`.

    Attributes:
        step: optimiser steps done.
        kind: why it was written.
        lock_digest: digest of the mixture lock, or "" where the data came from no lock.
        files: every file but the manifest itself, by name.
        version: of the format it was written in.
        fence: number of the lease under which it was written; 0 where nothing is known of one.
        folder: sub-folder of the files, "" where they lie beside the manifest.
    """

    step: Size
    kind: Kind
    lock_digest: str
    files: tuple[FileEntry, ...]
    version: int = VERSION
    fence: Size = 0
    folder: str = ""

    def __post_init__(self) -> None:
        if not _FOLDER.fullmatch(self.folder):
            raise ValueError("not the folder of a lease")

    @property
    def digest(self) -> str:
        """sha256 over everything it says, so over the checkpoint."""
        return canonical_digest(self._body())

    def encode(self) -> bytes:
        """Return the bytes of `manifest.json`."""
        return json.dumps({**self._body(), "digest": self.digest}, indent=1).encode() + b"\n"

    def _body(self) -> dict[str, Any]:
        plain = msgspec.to_builtins(self)
        plain["files"] = sorted(plain["files"], key=lambda entry: entry["name"])
        return {"format": FORMAT, "version": plain.pop("version"), **plain}

    @classmethod
    def read(cls, checkpoint: Store) -> CheckpointManifest:
        """Read the manifest of a checkpoint; its own digest is checked, the files are not.

        Args:
            checkpoint: its folder.

        Raises:
            ValidationError: it is missing, cannot be read, or is damaged.
            MisnamedError: the folder has the name of another step.
            OtherVersionError: it is of another version.
        """
        where, name = checkpoint.url(MANIFEST), checkpoint.root.rpartition("/")[2]
        try:
            data = read_json(checkpoint, MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValidationError(f"checkpoint {name} has no manifest", where=where) from error
        except (ResourceError, ValidationError, MalformedJson) as error:
            raise ValidationError(
                f"checkpoint {name} is damaged: its manifest cannot be read",
                where=where,
                why=str(error) if isinstance(error, MalformedJson) else error.what,
            ) from error
        try:
            manifest = cls._decode(data, name, where)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, OlmError):
                raise
            raise ValidationError(
                f"checkpoint {name} is damaged: its manifest is malformed", where=where
            ) from error
        if step_of(name) not in (None, manifest.step):
            raise MisnamedError(
                f"the folder {name} holds the checkpoint of step {manifest.step:,}",
                where=checkpoint.root,
                fix=f"move it away, or name it {folder_name(manifest.step)}",
            )
        return manifest

    @classmethod
    def _decode(cls, data: bytes, name: str, where: str) -> CheckpointManifest:
        value = decode_object(data)
        found = value.pop("digest")
        written = value["format"], value["version"]
        if written != (FORMAT, VERSION):
            raise OtherVersionError(
                f"checkpoint {name} is {printable('{} version {}'.format(*written))}; this program "
                f"reads {FORMAT} version {VERSION}",
                where=where,
                fix="go on with the program that wrote it, or a newer one",
            )
        if found == canonical_digest(value):
            manifest = convert(value, cls)
            listed: set[str] = set()
            for file in (entry.name for entry in manifest.files):
                if file in listed or not _FILE.fullmatch(file):
                    raise ValidationError(
                        f"the manifest of checkpoint {name} lists {printable(file)}, no file of a "
                        "checkpoint",
                        where=where,
                    )
                listed.add(file)
            if data == manifest.encode():
                return manifest
        raise ValidationError(
            f"the manifest of checkpoint {name} was changed: its digest is wrong", where=where
        )

    def files_in(self, checkpoint: Store) -> Store:
        """Return the folder of the files of a checkpoint with this manifest."""
        return checkpoint.child(self.folder) if self.folder else checkpoint

    def problems(self, checkpoint: Store, *, share: int = 0, shares: int = 1) -> list[str]:
        """Return what is wrong with the files, one sentence each; empty when all is well.

        Sizes and stray files are checked whole; of the sha256 only every `shares`-th, from number
        `share` on, so that ranks can divide the reading.
        """
        checkpoint = self.files_in(checkpoint)
        wrong: list[str] = []
        sizes = {entry.name: entry.size for entry in checkpoint.entries()}
        listed = {entry.name for entry in self.files}
        for name in sizes.keys() - listed:
            if name.startswith(f"{TENSORS}/"):
                wrong.append(f"{printable(name)} is not in the manifest")
        for number, entry in enumerate(self.files):
            size = sizes.get(entry.name)
            if size is None:
                wrong.append(f"{entry.name} is missing")
            elif size != entry.bytes:
                wrong.append(f"{entry.name} has {size:,} bytes instead of {entry.bytes:,}")
            elif number % shares == share:
                wrong += _wrong_bytes(checkpoint, entry)
        return wrong


def _wrong_bytes(files: Store, entry: FileEntry) -> list[str]:
    try:
        if files.sha256(entry.name) == entry.sha256:
            return []
    except (ResourceError, ValidationError) as error:  # a disk that fails, a link, a pipe
        return [f"{entry.name} cannot be read: {error.what}"]
    return [f"{entry.name} has another sha256: its bytes changed"]


class MisnamedError(ValidationError):
    """A checkpoint, whole or not, in a folder that has the name of another step."""


class OtherVersionError(ValidationError):
    """A checkpoint of a version that this program does not know, whole or not: exit 3."""


def folder_name(step: int) -> str:
    """Return the name of the checkpoint of `step`: `step00000100`."""
    return f"step{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder name, None of any other name."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def partial_name(name: str, fence: int, *, old: bool = False) -> str:
    """Return the name of the local folder in which a checkpoint is written under a lease.

    Args:
        name: of its folder.
        old: of the folder into which a damaged one of that step is moved before it goes.
    """
    numbered = f"-{fence:06d}" if fence else ""
    return f"{name}{numbered}{'-old' if old else ''}{PARTIAL_SUFFIX}"


def fence_of_partial(name: str) -> int | None:
    """Return the lease number in a partial folder's name, 0 for none, None of any other name."""
    found = _PARTIAL.fullmatch(name)
    return None if found is None else int(found[1] or 0)


def files_folder(fence: int) -> str:
    """Return the sub-folder for the files of a remote checkpoint, "" where there is no lease."""
    return f"lease-{fence:06d}" if fence else ""


def fence_of_file(name: str) -> int:
    """Return the lease number in the name of a file of a remote checkpoint, 0 for none."""
    found = _FOLDER.fullmatch(name.partition("/")[0])
    return int(found[1] or 0) if found else 0


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


def swept(save_folder: str, fence: Fence | None) -> tuple[list[str], list[OlmError]]:
    """Return the `candidates` of a folder, once `remove_partial` has been there.

    A run writes the pointer after the checkpoint, and never removes the newest one. So where
    `latest` names one that is not among them, the error that it is gone is returned, too.
    """
    remove_partial(save_folder, fence)
    store, found = Store(save_folder), candidates(save_folder)
    try:
        name = store.read(POINTER, limit=MAX_POINTER).decode("ascii", "replace").strip()
    except (FileNotFoundError, InputError, ValidationError):
        return found, []
    if step_of(name) is None or name in found:
        return found, []
    gone = f"the checkpoint {name} that `{POINTER}` names is gone"
    return found, [InputError(gone, where=store.root)]


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
