"""What an argument `DIR|LOCK` names: a dataset's folder or URL, or a mixture lock."""

from __future__ import annotations

from olm_data.dataset.manifest import MANIFEST


def is_lock(target: str) -> bool:
    """Whether `target` names a lock file rather than a dataset's folder."""
    return target.endswith(".json") and not target.endswith(f"/{MANIFEST}") and target != MANIFEST


def dataset_root(target: str) -> str:
    """Return the folder of the dataset `target` names, itself or by its manifest.json."""
    if target == MANIFEST:
        return "."
    return target.removesuffix(f"/{MANIFEST}") or (target and "/")
