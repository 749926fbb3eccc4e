"""The checkpoint format, version 2: names, and the manifest that makes a checkpoint one.

    <save_folder>/               a local path or s3://bucket/prefix
      latest                     name of the newest checkpoint; a convenience, never trusted
      step00000100/
        model_and_optim/         .metadata and __<rank>_<n>.distcp, written by torch DCP
        train.json               step, loader state, callbacks' state, world size, origin
        config.json              resolved configuration of the run
        mixture.lock.json        copy of the lock
        manifest.json            sizes and sha256 of all the above; written last
      step00000150.tmp/          being written, or left by a kill: never read, cleaned at the start

A folder is a checkpoint if its manifest lists exactly what `model_and_optim/` holds and every
listed file has its size and sha256. DCP's `.metadata` is a pickle: nothing reads it before that.

Version 2 added the kind `fixed` and other values of `model.qk_norm` (`migrate.py`); checkpoints of
version 1 are read as well.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from olm_data.canonical import digest as canonical_digest
from olm_data.canonical import sha256_file
from olm_data.errors import ValidationError, printable
from olm_data.storage.store import Store

FORMAT, VERSION = "olm-checkpoint", 2
READABLE = (1, 2)
MANIFEST, TENSORS, STATE, CONFIG, LOCK = (
    "manifest.json",
    "model_and_optim",
    "train.json",
    "config.json",
    "mixture.lock.json",
)
METADATA = f"{TENSORS}/.metadata"
POINTER = "latest"
PARTIAL_SUFFIX = ".tmp"

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
        """Measure a local file."""
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
        version: of the format it was written in.
    """

    step: int
    kind: Kind
    lock_digest: str
    files: tuple[FileEntry, ...]
    version: int = VERSION

    @property
    def digest(self) -> str:
        """sha256 over everything it says, so over the checkpoint."""
        found: str = json.loads(self.to_json())["digest"]
        return found

    def to_json(self) -> bytes:
        """Return the bytes of `manifest.json`."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            "kind": self.kind.value,
            "lock_digest": self.lock_digest,
            "files": [asdict(entry) for entry in sorted(self.files, key=lambda e: e.name)],
        }
        value["digest"] = canonical_digest(value)
        return json.dumps(value, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, checkpoint: Store) -> Manifest:
        """Read the manifest of a checkpoint; its own digest is checked, the files are not.

        Raises:
            ValidationError: it is missing, damaged, or of another version.
        """
        where = checkpoint.url(MANIFEST)
        try:
            data = checkpoint.read(MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValidationError("there is no manifest", where=where) from error
        try:
            value = json.loads(data)
            found = value.pop("digest")
            name, version = value["format"], value["version"]
            if name != FORMAT or version not in READABLE:
                raise _other_version(name, version, where)
            if found == canonical_digest(value):
                files = tuple(FileEntry(**entry) for entry in value["files"])
                kind = Kind(value["kind"])
                manifest = cls(value["step"], kind, value["lock_digest"], files, version)
                for entry in files:
                    if not _FILE.fullmatch(entry.name):
                        raise ValidationError(
                            f"the manifest lists {printable(entry.name)}, no file of a checkpoint",
                            where=where,
                        )
                if data == manifest.to_json():
                    return manifest
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ValidationError):
                raise
            raise ValidationError("the manifest is damaged", where=where) from error
        raise ValidationError("the manifest was changed: its digest is wrong", where=where)

    def entry(self, name: str) -> FileEntry:
        """Return the entry of a file."""
        return next(entry for entry in self.files if entry.name == name)

    def problems(self, checkpoint: Store, *, share: int = 0, shares: int = 1) -> list[str]:
        """Return what is wrong with the files, one sentence each; empty when all is well.

        Sizes and stray files are checked whole; of the sha256 only every `shares`-th, from number
        `share` on, so that ranks can divide the reading.
        """
        wrong = []
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
            elif number % shares == share and checkpoint.sha256(entry.name) != entry.sha256:
                wrong.append(f"{entry.name} has another sha256: its bytes changed")
        return wrong


def _other_version(name: Any, version: Any, where: str) -> ValidationError:
    known = " and ".join(str(number) for number in READABLE)
    return ValidationError(
        f"this is {printable(str(name))} version {printable(str(version))}; this program reads "
        f"{FORMAT} versions {known}",
        where=where,
        fix="go on with the program that wrote it, or a newer one",
    )


def folder_name(step: int) -> str:
    """Return the name of the checkpoint of `step`: `step00000100`."""
    return f"step{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder name, None of any other name."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])
