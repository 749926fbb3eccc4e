"""What both passes over a plan have in common: its inputs, its stores, the ids it leaves out.

PlanJob -> FindDuplicates (dedup.py): a first pass, which writes no shard
        -> TokenizeJob (job.py):      the shards of each split
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.dataset.manifest import EXCLUDED, MAX_IDS, VALIDATION
from olm_data.dataset.plan import Plan
from olm_data.encoders.code_points import Ranges
from olm_data.errors import InputError, ValidationError
from olm_data.select.selection import IdSet
from olm_data.sources import current_revision
from olm_data.storage.store import STAGING_PREFIX, WORKER_PREFIX, Store
from olm_data.tokenizer.tokenizer import TokenizerSpec


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """The tasks of a plan. See `runners.base.StoredJob`.

    Attributes:
        plan: the plan.
        inputs, read: what to read and how.
        tokenizer: the tokenizer.
        encoder: name of the encoder plug-in, already chosen.
        routed: code points whose documents are encoded by the reference.
        output: root of the dataset's store; an absolute path if it is local.
        single_writer: nobody else writes there; see `Store`.
        worker: name of the process that runs tasks beside the parent, or None in the parent's own
            processes. Not part of what is stored.
    """

    plan: Plan
    inputs: tuple[InputFile, ...]
    read: ReadOptions
    tokenizer: TokenizerSpec
    encoder: str
    routed: Ranges = ()
    output: str
    single_writer: bool = False
    worker: str | None = None

    @cached_property
    def splits(self) -> list[Store]:
        """The stores of the splits: train, and validation if something is held out."""
        prefix = STAGING_PREFIX if self.worker is None else f"{WORKER_PREFIX}{self.worker}~"
        single = self.single_writer
        store = Store(self.output, single_writer=single, staging_prefix=prefix)
        held_out = self.plan.settings.holdout_below
        return [store, store.child(VALIDATION)] if held_out else [store]

    @cached_property
    def excluded(self) -> IdSet | None:
        """The ids to leave out, read from the store once a process.

        Raises:
            ValidationError: they are not those of the plan.
        """
        if self.read.exclude is None:
            return None
        store = self.splits[0]
        try:
            ids = IdSet.from_npy(store.read(EXCLUDED, limit=MAX_IDS))
        except (FileNotFoundError, ValueError):
            ids = None
        if ids is None or ids.sha256 != self.read.exclude:
            raise ValidationError(
                "the ids to leave out are damaged",
                where=store.url(EXCLUDED),
                fix="run the same tokenize command again",
            )
        return ids

    def __getstate__(self) -> dict[str, Any]:
        cached = ("text_encoder", "splits", "excluded")
        return {name: value for name, value in self.__dict__.items() if name not in cached}

    @property
    def identity(self) -> str:
        """Differs between jobs that write other bytes."""
        return self.plan.digest

    def prepare(self) -> None:
        """See `runners.base.Job.prepare`."""

    def describe(self, task: int) -> str:
        """Return the task's inputs in words."""
        return self.plan.describe(task)

    def beside(self, worker: str) -> Self:
        """Return the job for a process beside the parent's own. See `runners.base.StoredJob`."""
        return replace(self, worker=worker)

    def check_unchanged(self, task: int) -> None:
        """Refuse inputs of a task that are not as they were when it was planned.

        Raises:
            InputError: one has changed.
        """
        for index in self.plan.inputs_of(task):
            source = self.inputs[index]
            if current_revision(source) != source.revision:
                raise InputError(
                    "an input changed while it was being read",
                    where=source.path,
                    why="its shard would mix two versions of the file",
                    fix="once the file no longer changes, delete the output and run again",
                )
