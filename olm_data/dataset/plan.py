"""The plan of a tokenise run: which units of the inputs make which shard. Pure, values only.

    inputs + settings --(sources cut)--> units --(group, by size alone)--> tasks --> digest

A task is a run of consecutive units and becomes one shard (`shard-00000` is task 0 of a new
dataset), so documents keep their input order across shards. The plan depends on the inputs and on
options that change bytes; never on workers, host, clock or how far an earlier run came. Two runs
with the same digest write the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from olm_data.canonical import digest
from olm_data.dataset.container import Container
from olm_data.errors import UsageError

PLAN_VERSION = 1
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do, as plain JSON values.

    Attributes:
        settings: options that change bytes and digests of the tokenizer; str, int, bool, None.
        inputs: one object an input, with at least `path`, `bytes` and `revision`.
        units: `[input, start, stop, bytes]` each, in input order.
        tasks: (start, stop) ranges of units, one a shard.
        digest: sha256 of all of this but the inputs' revisions and URLs.
    """

    settings: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]]
    units: Sequence[Sequence[int]]
    tasks: Sequence[tuple[int, int]]
    digest: str

    @property
    def first_shard(self) -> int:
        """Number of the first task's shard: 0, but for what is added to a dataset."""
        return int(self.settings.get("first_shard", 0))

    @property
    def container(self) -> Container:
        """Whether the tokens of its shards have a NumPy header."""
        return "raw" if self.settings.get("container") == "raw" else "npy"

    def shard(self, task: int) -> str:
        """Return the name of the shard that a task writes."""
        return shard_name(self.first_shard + task)

    def text_bytes(self, task: int) -> int:
        """Return the estimated bytes of text of a task."""
        start, stop = self.tasks[task]
        return sum(unit[3] for unit in self.units[start:stop])

    def inputs_of(self, task: int) -> list[int]:
        """Return the indices of the inputs a task reads, ascending."""
        start, stop = self.tasks[task]
        return sorted({unit[0] for unit in self.units[start:stop]})

    def describe(self, task: int) -> str:
        """Return words for the inputs of a task: `a.jsonl` or `a.jsonl to c.jsonl (3 files)`."""
        inputs = self.inputs_of(task)
        paths = [self.inputs[i]["path"] for i in inputs]
        if len(paths) == 1:
            return str(paths[0])
        return f"{paths[0]} to {paths[-1]} ({len(paths)} files)"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as stored in `plan.json`."""
        return {
            "format": "olm-plan",
            "version": PLAN_VERSION,
            "settings": dict(self.settings),
            "inputs": [dict(item) for item in self.inputs],
            "units": [list(unit) for unit in self.units],
            "tasks": [list(task) for task in self.tasks],
            "digest": self.digest,
        }

    def encode(self) -> bytes:
        """Return the bytes of `plan.json`."""
        return json.dumps(self.to_json(), indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: it is no plan of this version, or its digest is not that of its content.
        """
        if (value.get("format"), value.get("version")) != ("olm-plan", PLAN_VERSION):
            raise ValueError(f"not a plan of version {PLAN_VERSION}")
        plan = _with_digest(
            value["settings"],
            value["inputs"],
            value["units"],
            tuple((start, stop) for start, stop in value["tasks"]),
        )
        if plan.digest != value["digest"]:
            raise ValueError("its digest is not that of its content")
        return plan

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Return one sentence for each way this plan differs from a stored one; [] when none does.

        Args:
            stored: what `to_json` of an earlier plan returned.
        """
        found = []
        if stored.get("version") != PLAN_VERSION:
            return [f"plan version: {stored.get('version')!r} there, {PLAN_VERSION} now"]
        before, now = stored["settings"], dict(self.settings)
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                found.append(f"{key}: {before.get(key)!r} there, {now.get(key)!r} now")
        then = {item["path"]: item for item in stored["inputs"]}
        for item in self.inputs:
            old = then.pop(item["path"], None)
            if old is None:
                found.append(f"input {item['path']}: new")
            elif old["bytes"] != item["bytes"]:
                found.append(
                    f"input {item['path']}: {old['bytes']:,} bytes there, {item['bytes']:,} now"
                )
            elif old["revision"] != item["revision"]:
                found.append(
                    f"input {item['path']}: changed since (revision {old['revision']} there)"
                )
        found += [f"input {path}: gone" for path in then]
        if not found and stored["digest"] != self.digest:
            found.append("the inputs are cut in another way")
        return found


def make_plan(
    *,
    settings: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    units: Sequence[Sequence[int]],
    target: int,
) -> Plan:
    """Group units into tasks and return the plan with its digest.

    Args:
        settings: options that change bytes and digests of the tokenizer.
        inputs: objects with at least `path`, `bytes` and `revision`.
        units: `[input, start, stop, bytes]` in input order.
        target: wanted bytes of text a task.
    """
    return _with_digest(settings, inputs, units, group([unit[3] for unit in units], target))


def _with_digest(
    settings: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    units: Sequence[Sequence[int]],
    tasks: tuple[tuple[int, int], ...],
) -> Plan:
    identity = {
        "version": PLAN_VERSION,
        "settings": dict(settings),
        "inputs": [[item["path"], item["bytes"]] for item in inputs],
        "units": [list(unit) for unit in units],
        "tasks": [list(task) for task in tasks],
    }
    return Plan(settings=settings, inputs=inputs, units=units, tasks=tasks, digest=digest(identity))
