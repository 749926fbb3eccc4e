"""Checkpoints as format version 2 wrote them: index and tensors in pickles of torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from olm_data.canonical import digest


def seal(folder: Path, *, listed: bool = True, **changes: Any) -> None:
    """Make the manifest of a checkpoint true again, as anybody can who may write there.

    Args:
        folder: of the checkpoint.
        listed: list the files anew; else only the digest is made good.
        changes: other values for fields of the manifest, such as `version`.
    """
    path = folder / "manifest.json"
    value = json.loads(path.read_bytes()) | changes
    del value["digest"]
    if value["version"] < 3:
        value = {name: value[name] for name in value if name not in ("fence", "folder")}
    if listed:
        value["files"] = _files(folder)
    path.write_text(json.dumps(value | {"digest": digest(value)}, indent=1) + "\n")


def _files(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "name": file.relative_to(folder).as_posix(),
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(folder.rglob("*"), key=lambda f: f.relative_to(folder).as_posix())
        if file.is_file() and file != folder / "manifest.json"
    ]


def as_version_2(folder: Path, state: dict[str, Any], lock_folder: Path) -> None:
    """Write a checkpoint of today anew as version 2 did, with the tensors of `state`."""
    tensors = folder / "model_and_optim"
    for file in tensors.iterdir():
        file.unlink()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tensors), no_dist=True)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    train = json.loads((folder / "train.json").read_bytes())
    (folder / "train.json").write_text(json.dumps(train | {"lock_folder": str(lock_folder)}))
    seal(folder, version=2)
