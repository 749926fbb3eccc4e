"""Changes a dataset as a forger would, and says which fields verify found wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from olm_data.bounded_json import digest
from olm_data.dataset.manifest import Manifest
from olm_data.extensions.verify.shard import VerifyReport
from olm_data.mixture.lock import UNDIGESTED


def flip(path: Path, at: int = -1) -> None:
    """Change a bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def fields(report: VerifyReport) -> set[tuple[str, str]]:
    return {(Path(finding.file).name, finding.field) for finding in report.findings}


def forged_lock(content: dict[str, Any]) -> bytes:
    """The content of a lock with the digest that it should have."""
    body = {key: item for key, item in content.items() if key not in UNDIGESTED}
    return json.dumps(content | {"digest": digest(body)}).encode()


def rewrite(dataset: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it the digest of its new content, as a forger would."""
    value = json.loads((dataset / "manifest.json").read_bytes())
    change(value)
    manifest = msgspec.json.decode(msgspec.json.encode(value), type=Manifest)
    forged = msgspec.structs.replace(manifest, digest=manifest.compute_digest())
    (dataset / "manifest.json").write_bytes(forged.encode())
