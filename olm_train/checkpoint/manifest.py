"""The checkpoint format, version 1: names, the manifest that makes a checkpoint one, the pointer.

    <save_folder>/
      latest                     name of the newest checkpoint; a convenience, never trusted
      step00000100/
        model_and_optim/         .metadata and __<rank>_<n>.distcp, written by torch DCP
        train.json               step, loader state, callbacks' state, world size
        config.json              resolved configuration of the run
        mixture.lock.json        copy of the lock
        manifest.json            sizes and sha256 of all the above; written last
      step00000150.tmp/          being written, or left by a kill: never read, cleaned at the start

A folder is a checkpoint if its manifest lists exactly what `model_and_optim/` holds and every
listed file has its size and sha256. DCP's `.metadata` is a pickle: nothing reads it before that.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from olm_data.canonical import digest, sha256_file
from olm_data.errors import ValidationError, printable

FORMAT, VERSION = "olm-checkpoint", 1
MANIFEST, TENSORS, STATE, CONFIG, LOCK = (
    "manifest.json",
    "model_and_optim",
    "train.json",
    "config.json",
    "mixture.lock.json",
)
POINTER = "latest"
PARTIAL_SUFFIX = ".tmp"

_NAME = re.compile(r"step(\d{8,})")
_FILE = re.compile(r"(?:model_and_optim/)?[A-Za-z0-9_.][A-Za-z0-9_.-]*")


class Kind(StrEnum):
    """Why a checkpoint was written, which decides how long it stays."""

    permanent = "permanent"
    """At `save_interval`: never removed."""
    ephemeral = "ephemeral"
    """At `ephemeral_save_interval`, or on preemption: removed after the next one is complete."""
    final = "final"
    """At the end of a run."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        name: path inside the checkpoint, with `/`.
        bytes: exact size.
        sha256: of its bytes.
    """

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, folder: Path, name: str) -> FileEntry:
        """Measure a file."""
        path = folder / name
        return cls(name, path.stat().st_size, sha256_file(path))


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        step: optimiser steps done.
        kind: why it was written.
        lock_digest: digest of the mixture lock, or "" where the data came from no lock.
        files: every file but the manifest itself, by name.
    """

    step: int
    kind: Kind
    lock_digest: str
    files: tuple[FileEntry, ...]

    def to_json(self) -> bytes:
        """Return the bytes of `manifest.json`."""
        value: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        value["kind"] = self.kind.value
        value["files"] = [asdict(entry) for entry in sorted(self.files, key=lambda e: e.name)]
        value["digest"] = digest(value)
        return json.dumps(value, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint; its own digest is checked, the files are not.

        Raises:
            ValidationError: it is missing, damaged, or of another version.
        """
        where = str(folder / MANIFEST)
        try:
            data = (folder / MANIFEST).read_bytes()
            value = json.loads(data)
            found = value.pop("digest")
            version = (value["format"], value["version"])
            if version == (FORMAT, VERSION) and found == digest(value):
                files = tuple(FileEntry(**entry) for entry in value["files"])
                manifest = cls(value["step"], Kind(value["kind"]), value["lock_digest"], files)
                for entry in files:
                    if not _FILE.fullmatch(entry.name):
                        raise ValidationError(
                            f"the manifest lists {printable(entry.name)}, no file of a checkpoint",
                            where=where,
                        )
                if data == manifest.to_json():
                    return manifest
        except OSError as error:
            raise ValidationError("there is no manifest", where=where) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ValidationError):
                raise
            raise ValidationError("the manifest is damaged", where=where) from error
        if version != (FORMAT, VERSION):
            raise ValidationError(
                f"this is {printable(str(version[0]))} version {printable(str(version[1]))}; "
                f"this program reads {FORMAT} version {VERSION}",
                where=where,
            )
        raise ValidationError("the manifest was changed: its digest is wrong", where=where)

    def entry(self, name: str) -> FileEntry:
        """Return the entry of a file."""
        return next(entry for entry in self.files if entry.name == name)

    def problems(self, folder: Path, *, share: int = 0, shares: int = 1) -> list[str]:
        """Return what is wrong with the files, one sentence each; empty when all is well.

        Sizes and stray files are checked whole; of the sha256 only every `shares`-th, from number
        `share` on, so that ranks can divide the reading.
        """
        wrong = []
        listed = {entry.name for entry in self.files}
        for path in sorted((folder / TENSORS).iterdir()) if (folder / TENSORS).is_dir() else ():
            if f"{TENSORS}/{path.name}" not in listed:
                wrong.append(f"{TENSORS}/{printable(path.name)} is not in the manifest")
        for number, entry in enumerate(self.files):
            path = folder / entry.name
            if not path.is_file():
                wrong.append(f"{entry.name} is missing")
            elif path.stat().st_size != entry.bytes:
                size = path.stat().st_size
                wrong.append(f"{entry.name} has {size:,} bytes instead of {entry.bytes:,}")
            elif number % shares == share and sha256_file(path) != entry.sha256:
                wrong.append(f"{entry.name} has another sha256: its bytes changed")
        return wrong


def folder_name(step: int) -> str:
    """Return the name of the checkpoint of `step`: `step00000100`."""
    return f"step{step:08d}"


def candidates(save_folder: Path) -> list[Path]:
    """Return the folders named like checkpoints, newest step first; none is checked yet."""
    if not save_folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in save_folder.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def partial_folders(save_folder: Path) -> list[Path]:
    """Return the folders that a killed save or removal left."""
    if not save_folder.is_dir():
        return []
    return [
        path
        for path in save_folder.iterdir()
        if path.name.endswith(PARTIAL_SUFFIX)
        and _NAME.fullmatch(path.name.removesuffix(PARTIAL_SUFFIX))
    ]


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until its bytes are on disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folders(folders: Iterable[Path]) -> None:
    """Wait until the names in these folders are on disk."""
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_pointer(save_folder: Path, step: int) -> None:
    """Let `latest` name the checkpoint of `step`, atomically."""
    temporary = save_folder / (POINTER + PARTIAL_SUFFIX)
    write_durably(temporary, folder_name(step).encode() + b"\n")
    os.replace(temporary, save_folder / POINTER)
    sync_folders([save_folder])
