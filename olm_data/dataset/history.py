"""The versions of a dataset: what `olm-data add` makes of one, and what it leaves in place.

    manifest.json (version n) --kept as--> manifests/<its digest>.json
                              --replaced by--> manifest.json (version n + 1)

    plan.json, plan-00001.json, ...     one a version: a version's shards are numbered after those
                                        of the plans before it, and are never written again

A version's manifest lists all shards and inputs, old ones first and unchanged, and in `added` where
each addition begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.manifest import (
    MANIFEST,
    PLAN,
    Manifest,
    decode_manifest,
    read_manifest,
    version_name,
)
from olm_data.dataset.plan import Plan
from olm_data.dataset.record import RECORD, ShardRecord
from olm_data.errors import OlmError, ValidationError
from olm_data.storage.json_file import read_json, write_json
from olm_data.storage.store import Store
from olm_data.threads import in_order

_RESTORE = "restore the file from a copy, or tokenise all inputs again into a new output"


@dataclass(frozen=True)
class Version:
    """One split of a dataset, as it is before an addition.

    Attributes:
        store: where it is.
        manifest: of its newest version.
        encoded: the very bytes of `manifest.json`.
    """

    store: Store
    manifest: Manifest
    encoded: bytes

    @classmethod
    def newest(cls, store: Store) -> Version:
        """Read the newest version. Raises as `manifest.read_manifest`."""
        read_manifest(store)  # explains what is missing
        encoded = read_json(store, MANIFEST)
        return cls(store, decode_manifest(encoded, store.url(MANIFEST)), encoded)

    def records(self) -> list[tuple[ShardRecord, str]]:
        """Return the commit record of each shard with its file's sha256.

        Raises:
            ValidationError: a record is missing, or not the one the manifest names.
        """
        return list(in_order(self._record, range(len(self.manifest.shards))))

    def _record(self, index: int) -> tuple[ShardRecord, str]:
        info = self.manifest.shards[index]
        url = self.store.url(info.name + RECORD)
        try:
            data = read_json(self.store, info.name + RECORD)
            digest = hashlib.sha256(data).hexdigest()
            if digest == info.sha256["record"]:
                return ShardRecord.parse(data), digest
        except (FileNotFoundError, MalformedJson) as error:
            raise ValidationError(
                "a shard's commit record is missing or damaged", where=url, fix=_RESTORE
            ) from error
        raise ValidationError(
            "a shard's commit record is not the one the manifest names", where=url, fix=_RESTORE
        )

    def replace(self, manifest: Manifest) -> None:
        """Keep this version's manifest under its digest, and put `manifest` in its place.

        Does nothing where `manifest` is there already.

        Raises:
            ConflictError: something else is there.
        """
        if manifest.digest == self.manifest.digest:
            return
        write_json(self.store, version_name(str(self.manifest.digest)), self.encoded)
        self.store.replace(MANIFEST, manifest.encode(), self.encoded)


def plan_name(number: int) -> str:
    """Return the name of the plan of addition `number`, or of the dataset's first plan for 0."""
    return f"plan-{number:05d}.json" if number else PLAN


def plan_digests(manifest: Manifest) -> list[str]:
    """Return the digests of a dataset's plans: of its first run, then of each addition."""
    return [manifest.plan, *(addition.plan for addition in manifest.additions)]


def read_plans(store: Store, manifest: Manifest) -> list[Plan]:
    """Read the plans of a dataset's first run and of each addition.

    Raises:
        ValidationError: one is missing, damaged, or not the one the manifest names.
    """
    plans = []
    for number, digest in enumerate(plan_digests(manifest)):
        url = store.url(plan_name(number))
        try:
            plan = Plan.read(store, plan_name(number))
        except (FileNotFoundError, MalformedJson) as error:
            raise ValidationError(
                "a plan of the dataset is missing or damaged",
                where=url,
                why="it says which shards there are, and which text made them",
                fix=_RESTORE,
            ) from error
        if plan.digest != digest:
            raise ValidationError(
                "this plan is not the one the manifest names", where=url, fix=_RESTORE
            )
        plans.append(plan)
    return plans


def check_chain(store: Store, manifest: Manifest) -> list[tuple[str, str, str]]:
    """Compare a manifest with those of the versions before it.

    Returns:
        (file, expected, found) for each disagreement; [] where each version's shards, inputs and
        options are the beginning of the next one's.
    """
    found: list[tuple[str, str, str]] = []
    following = manifest
    for addition in reversed(manifest.additions):
        name = version_name(addition.parent)
        try:
            before = decode_manifest(read_json(store, name), store.url(name))
        except FileNotFoundError:
            found.append((store.url(name), "the manifest of an earlier version", "nothing"))
            return found
        except (OlmError, MalformedJson) as error:
            said = error.what if isinstance(error, OlmError) else str(error)
            found.append((store.url(name), "an unchanged manifest", said))
            return found
        for what, expected, there in _differences(before, following, addition.parent):
            found.append((f"{store.url(name)} {what}", str(expected), str(there)))
        following = before
    return found


def _differences(before: Manifest, after: Manifest, parent: str) -> list[tuple[str, Any, Any]]:
    addition = after.additions[-1]
    pairs: Sequence[tuple[str, Any, Any]] = (
        ("digest", parent, before.digest),
        ("tokenizer", after.tokenizer, before.tokenizer),
        ("options", after.stored_options, before.stored_options),
        ("plan", after.plan, before.plan),
        ("shards", after.shards[: len(before.shards)], before.shards),
        ("inputs", after.inputs[: addition.first_input], before.inputs),
        ("additions", after.additions[:-1], before.additions),
    )
    return [pair for pair in pairs if pair[1] != pair[2]]
