"""The plan of a tokenise run, `plan.json`: which units of the inputs make which shard.

    inputs + settings --(sources cut)--> units --(group, by size alone)--> tasks --> digest

A task is a run of consecutive units and becomes one shard (`shard-00000` is task 0 of a new
dataset), so documents keep their input order across shards. The plan depends on the inputs and on
options that change bytes; never on workers, host, clock or how far an earlier run came. Two runs
with the same digest write the same bytes.

Also: the versions of a dataset: what `olm-data add` makes of one, and what it leaves in place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from olm_data import __version__
from olm_data.bounded_json import MalformedJson, Size, decode, digest
from olm_data.dataset.inputs import PositionKind, Unit
from olm_data.dataset.manifest import (
    JOB,
    MANIFEST,
    PLAN,
    Manifest,
    decode_manifest,
    read_manifest,
    version_name,
)
from olm_data.dataset.options import Settings
from olm_data.dataset.record import RECORD, ShardRecord
from olm_data.errors import UsageError, ValidationError, printable
from olm_data.storage.store import Store, read_json, write_json
from olm_data.threads import in_order

PLAN_VERSION: Literal[1] = 1
TEXT_BYTES_PER_TOKEN = 4
"""Converts a shard's size in tokens to bytes of text. Fixed: real tokenizers get 3 to 5."""

DEFAULT_SHARD_TOKENS = 100_000_000
LEAST_SHARDS = 64
MOST_TASKS = 1 << 19
"""Tasks that are named one by one, as their names may come from a file of others."""

LEAST_SHARD_TEXT = 4 << 20

_TEXT_PER_FILE_BYTE = {".gz": 3, ".zst": 3, ".xz": 3, ".bz2": 3, ".parquet": 2}


def likely_text(files: Sequence[tuple[str, int]]) -> int:
    """Guess the bytes of text in `files`, (path, bytes) pairs, from their names and sizes alone."""
    return sum(
        size * next((k for end, k in _TEXT_PER_FILE_BYTE.items() if path.endswith(end)), 1)
        for path, size in files
    )


def shard_text(text_bytes: int, shard_tokens: int | None) -> int:
    """Return how many bytes of text to put in a shard.

    Args:
        text_bytes: likely bytes of text of all inputs; 0 when unknown.
        shard_tokens: what the user asked for, or None: then 100 million tokens, and less for small
            inputs, so that there are about 64 shards to share between workers, of at least 4 MiB.
    """
    if shard_tokens is not None:
        return shard_tokens * TEXT_BYTES_PER_TOKEN
    most = DEFAULT_SHARD_TOKENS * TEXT_BYTES_PER_TOKEN
    if text_bytes == 0:
        return most
    return min(most, max(LEAST_SHARD_TEXT, text_bytes // LEAST_SHARDS))


def group(sizes: Sequence[int], target: int) -> tuple[tuple[int, int], ...]:
    """Group consecutive units into tasks.

    Args:
        sizes: estimated bytes of text of each unit, in input order.
        target: wanted bytes of text a task. A task holds as many whole units as fit; a unit larger
            than the target is a task of its own.

    Returns:
        (start, stop) unit ranges that tile 0..len(sizes) in order, none empty.
    """
    tasks: list[tuple[int, int]] = []
    start = size = 0
    for index, more in enumerate(sizes):
        if index > start and size + more > target:
            tasks.append((start, index))
            start, size = index, 0
        size += more
    if len(sizes) > start:
        tasks.append((start, len(sizes)))
    return tuple(tasks)


def shard_name(number: int) -> str:
    """Return the name of shard number `number` of a dataset."""
    return f"shard-{number:05d}"


def parse_tasks(text: str) -> list[int]:
    """Return the task numbers, ascending, that `3-7,9` spells, as `spell_ranges` does.

    Raises:
        UsageError: it spells none.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"{part!r} is not a range of tasks", fix="write 3-7,9")
        found.update(range(int(match[1]), min(int(match[2] or match[1]), MOST_TASKS) + 1))
        if len(found) > MOST_TASKS:
            raise UsageError(f"{part!r} is more than {MOST_TASKS:,} tasks", fix="name fewer tasks")
    return sorted(found)


class OtherVersion(MalformedJson):
    """The plan is of a version that this release does not read."""


class _Header(msgspec.Struct, frozen=True):
    format: Literal["olm-plan"]
    version: int


class _Job(msgspec.Struct, frozen=True):
    """Of `job.json`, whatever its version: who wrote it."""

    packages: dict[str, str]


class PlannedInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input as a plan names it.

    `revision` is not digested, and empty for what was in the dataset before an addition.
    """

    path: str
    bytes: Size
    revision: str
    position: PositionKind


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run will do: all of `plan.json`.

    Attributes:
        settings: options that change bytes, and digests of the tokenizer.
        inputs: in reading order.
        units: in input order.
        tasks: (start, stop) ranges of units, one a shard.
        digest: sha256 of all of this but the inputs' revisions and positions.
    """

    format: Literal["olm-plan"]
    version: Literal[1]
    settings: Settings
    inputs: tuple[PlannedInput, ...]
    units: tuple[Unit, ...]
    tasks: tuple[tuple[Size, Size], ...]
    digest: str

    def shard(self, task: int) -> str:
        """Return the name of the shard that a task writes."""
        return shard_name(self.first_shard + task)

    @property
    def first_shard(self) -> int:
        """The number of the shard that task 0 writes."""
        return self.settings.first_shard or 0

    @property
    def shards(self) -> list[str]:
        """The names of the shards of all tasks."""
        return [self.shard(task) for task in range(len(self.tasks))]

    def units_of(self, task: int) -> tuple[Unit, ...]:
        """Return the units that a task reads."""
        start, stop = self.tasks[task]
        return self.units[start:stop]

    def text_bytes(self, task: int) -> int:
        """Return the estimated bytes of text of a task."""
        return sum(unit.bytes for unit in self.units_of(task))

    @property
    def all_text_bytes(self) -> int:
        """The estimated bytes of text of all tasks."""
        return sum(unit.bytes for unit in self.units)

    def inputs_of(self, task: int) -> list[int]:
        """Return the indices of the inputs a task reads, ascending."""
        return sorted({unit.input for unit in self.units_of(task)})

    def describe(self, task: int) -> str:
        """Return words for the inputs of a task: `a.jsonl` or `a.jsonl to c.jsonl (3 files)`."""
        paths = [self.inputs[i].path for i in self.inputs_of(task)]
        if len(paths) == 1:
            return paths[0]
        return f"{paths[0]} to {paths[-1]} ({len(paths)} files)"

    def by(self, settings: Settings) -> Plan:
        """Return the plan with other settings: the same inputs, units and tasks."""
        plan = msgspec.structs.replace(self, settings=settings)
        return msgspec.structs.replace(plan, digest=plan.compute_digest())

    def compute_digest(self) -> str:
        """Return the digest that the content should have."""
        return digest(
            {
                "version": PLAN_VERSION,
                "settings": msgspec.to_builtins(self.settings),
                "inputs": [[item.path, item.bytes] for item in self.inputs],
                "units": msgspec.to_builtins(self.units),
                "tasks": list(self.tasks),
            }
        )

    def encode(self) -> bytes:
        """Return the bytes of `plan.json`."""
        plan = msgspec.to_builtins(self)
        if self.settings.sample is None and self.settings.shuffle_documents:
            settings = plan["settings"]  # of the shuffle alone, the seed stands beside it
            after = list(settings)[list(settings).index("shuffle_documents") + 1 :]
            for name in ("seed", *after):
                settings[name] = settings.pop(name)
        return json.dumps(plan, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Plan:
        """Return the plan in these bytes.

        Raises:
            OtherVersion: it is a plan of another version.
            MalformedJson: it is no plan, or its digest is not that of its content.
        """
        try:
            plan = decode(data, cls)
        except MalformedJson:
            version = decode(data, _Header).version
            if version == PLAN_VERSION:
                raise
            raise OtherVersion(
                f"it is of version {version}, and this release reads version {PLAN_VERSION}"
            ) from None
        if plan.digest != plan.compute_digest():
            raise MalformedJson("its digest is not that of its content")
        return plan

    @classmethod
    def read(cls, store: Store, name: str) -> Plan:
        """Read a plan.

        Raises:
            FileNotFoundError: there is no such file.
            ValidationError: it is a plan of another version; or as `read_json`.
            MalformedJson: as `decode`.
        """
        try:
            return cls.decode(read_json(store, name))
        except OtherVersion as error:
            raise ValidationError(
                f"another release of olm-data wrote this plan: {error}",
                where=store.url(name),
                why=_writer(store),
                fix="use the release that wrote it, or tokenise the inputs again into a new output",
            ) from error

    def differences(self, stored: Plan) -> list[str]:
        """Return one sentence for each way this plan differs from `stored`; [] if in none."""
        found = []
        before, now = (
            msgspec.json.decode(msgspec.json.encode(plan.settings)) for plan in (stored, self)
        )
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                found.append(f"{key}: {before.get(key)!r} there, {now.get(key)!r} now")
        then = {item.path: item for item in stored.inputs}
        for item in self.inputs:
            old = then.pop(item.path, None)
            if old is None:
                found.append(f"input {item.path}: new")
            elif old.bytes != item.bytes:
                found.append(f"input {item.path}: {old.bytes:,} bytes there, {item.bytes:,} now")
            elif old.revision != item.revision:
                found.append(f"input {item.path}: changed since (revision {old.revision} there)")
        found += [f"input {path}: gone" for path in then]
        if not found and stored.digest != self.digest:
            found.append("the inputs are cut in another way")
        return found


def make_plan(
    settings: Settings, inputs: Sequence[PlannedInput], units: Sequence[Unit], target: int
) -> Plan:
    """Group units into tasks and return the plan with its digest.

    Args:
        units: in input order.
        target: wanted bytes of text a task.
    """
    plan = Plan(
        format="olm-plan",
        version=PLAN_VERSION,
        settings=settings,
        inputs=tuple(inputs),
        units=tuple(units),
        tasks=group([unit.bytes for unit in units], target),
        digest="",
    )
    return msgspec.structs.replace(plan, digest=plan.compute_digest())


def _writer(store: Store) -> str | None:
    try:
        release = decode(read_json(store, JOB), _Job).packages["olm"]
    except (FileNotFoundError, MalformedJson, KeyError):
        return None
    return f"it was written by olm-data {printable(release)}; this is olm-data {__version__}"


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
    for number, named in enumerate(plan_digests(manifest)):
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
        if plan.digest != named:
            raise ValidationError(
                "this plan is not the one the manifest names", where=url, fix=_RESTORE
            )
        plans.append(plan)
    return plans
