"""A lock in words, kept with the state of a loader so that a refusal can say what differs."""

from __future__ import annotations

from collections.abc import Mapping

from olm_data.bounded_json import JsonObject
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
        weight = f", loss weight {source.loss_weight}" if source.loss_weight else ""
        lines[f"source {source.name}"] = f"dataset {source.dataset}, {source.rows} rows{weight}"
    for stage in lock.stages:
        cut = f", cut into rows of {stage.sequence_length}" if stage.sequence_length else ""
        lines[f"stage {stage.label}"] = f"{stage.rows} rows in blocks of {list(stage.counts)}{cut}"
    return lines


def drawn_before(state: JsonObject, lock: Lock | None) -> str | None:
    """Return in words what of a lock's data another run has drawn from already; None: nothing.

    Args:
        state: of that run's data loader.
        lock: of a new run, which begins at its first row.
    """
    there = state.get("lock")
    consumed = state.get("rows_consumed")
    if lock is None or not isinstance(there, dict) or not isinstance(consumed, int) or not consumed:
        return None
    if state.get("lock_digest") == lock.digest:
        return (
            f"its run has trained on the first {consumed:,} rows of this very mixture; this run "
            "begins with the first row again"
        )
    drawn = {str(words) for key, words in there.items() if key.startswith("source ")}
    shared = [s.name for s in lock.sources if any(s.dataset in words for words in drawn)]
    return (
        f"its run has drawn rows from {', '.join(shared)}; some may be trained on again"
        if shared
        else None
    )


def lock_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return what differs between two descriptions, for a refusal."""
    keys = [*old, *(key for key in new if key not in old)]
    changed = [key for key in keys if old.get(key) != new.get(key)]
    return "; ".join(
        f"{key}: checkpoint has {old.get(key, 'nothing')}, this lock has {new.get(key, 'nothing')}"
        for key in changed
    )
