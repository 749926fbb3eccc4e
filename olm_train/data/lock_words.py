"""A lock in words, kept with the state of a loader so that a refusal can say what differs."""

from __future__ import annotations

from collections.abc import Mapping

from olm_data.mixture.lock import Lock
from olm_data.order.schedule import VERSION as ORDER


def describe_lock(lock: Lock) -> dict[str, str]:
    """Describe a lock, one line a thing that determines the order."""
    lines = {
        "seed": str(lock.seed),
        "sequence_length": str(lock.sequence_length),
        "order": ORDER,
        "packing": lock.packing.name,
        "tokenizer": lock.tokenizer.sha256,
    }
    for source in lock.sources:
        lines[f"source {source.name}"] = f"dataset {source.dataset}, {source.rows} rows"
    for stage in lock.stages:
        cut = f", cut into rows of {stage.sequence_length}" if stage.sequence_length else ""
        lines[f"stage {stage.label}"] = f"{stage.rows} rows in blocks of {list(stage.counts)}{cut}"
    return lines


def lock_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return what differs between two descriptions, for a refusal."""
    keys = [*old, *(key for key in new if key not in old)]
    changed = [key for key in keys if old.get(key) != new.get(key)]
    return "; ".join(
        f"{key}: checkpoint has {old.get(key, 'nothing')}, this lock has {new.get(key, 'nothing')}"
        for key in changed
    )
