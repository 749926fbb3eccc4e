"""Makes the manifest of a checkpoint true again after a change of its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from olm_data.bounded_json import digest


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
