"""A plan as a job: what a worker does for one task, in either pass over the plan.

    PlanJob -> FindDuplicates  --dedup: a first pass, which stores keys of documents and no shard
            -> TokenizeJob     units -> Pipeline -> ShardWriter of train (, of validation)
                                                 -> bad records -> Quarantine

What a task writes depends on the task alone. Every record of the input is a document of one split
or a drop with a reason; the commit record of the train shard carries that account for each input.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Self

import pyarrow as pa

from olm_data.config.import_path import is_import_path
from olm_data.counts import MAX_COUNT
from olm_data.dataset.account import CONTAMINATED, InputAccount, dropped_of
from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.dataset.plan import Plan
from olm_data.dataset.shard_writer import ShardWriter
from olm_data.encoders import TextEncoder, make_encoder
from olm_data.encoders.code_points import Ranges
from olm_data.errors import OlmError
from olm_data.runners.base import Deferred, Report
from olm_data.select.selection import IdSet
from olm_data.sources import current_revision, read_units
from olm_data.sources.readers import chat_reader
from olm_data.sources.remote_files import changed_input
from olm_data.storage.store import STAGING_PREFIX, WORKER_PREFIX, Store
from olm_data.tokenization.decontaminate import EvalTexts, stored_texts
from olm_data.tokenization.dedup import (
    find_keys,
    finish_keys,
    keys_found,
    read_drops,
    write_keys,
)
from olm_data.tokenization.encoded_parts import LONG_TASK, EncodedParts
from olm_data.tokenization.near_duplicates import find_band_keys
from olm_data.tokenization.pipeline import TaskPipeline
from olm_data.tokenization.quarantine import Quarantine
from olm_data.tokenization.select_documents import stored_ids
from olm_data.tokenization.task_results import TaskResult, finished_task, split_stores
from olm_data.tokenizer.tokenizer import TokenizerSpec

LISTED = {"near_duplicate": "near-duplicates", CONTAMINATED: "contaminated"}
"""Reason -> folder of the ids of the documents that were dropped for it, a file a task."""


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
        """The stores of the splits, as this process writes to them."""
        prefix = STAGING_PREFIX if self.worker is None else f"{WORKER_PREFIX}{self.worker}~"
        single = self.single_writer
        store = Store(self.output, single_writer=single, staging_prefix=prefix)
        return split_stores(store, self.plan)

    @cached_property
    def excluded(self) -> IdSet | None:
        """The ids to leave out, read from the store once a process.

        Raises:
            ValidationError: they are not those of the plan.
        """
        return stored_ids(self.splits[0], self.read.exclude)

    @cached_property
    def evaluated(self) -> EvalTexts | None:
        """The evaluation texts, read from the store once a process.

        Raises:
            ValidationError: they are not those of the plan.
        """
        return stored_texts(self.splits[0], self.plan.settings.decontaminate)

    def __getstate__(self) -> dict[str, Any]:
        stored = {field.name for field in fields(self)}  # not what is cached
        return {name: value for name, value in self.__dict__.items() if name in stored}

    @property
    def identity(self) -> str:
        """Differs between jobs that write other bytes."""
        return self.plan.digest

    @property
    def own_parts(self) -> bool:
        """Whether it names code of somebody's own, which workers have to import."""
        own = self.read.filter is not None or is_import_path(self.encoder)
        return own or any(item.format == "own" for item in self.inputs)

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
                raise changed_input(source.path)


class FindDuplicates(PlanJob):
    """The first pass of `--dedup`: stores the keys of each task's documents, and no shard."""

    @classmethod
    def before(cls, job: PlanJob) -> FindDuplicates:
        """Return the pass that goes before the one of `job`."""
        return cls(**{item.name: getattr(job, item.name) for item in fields(job)})

    @property
    def identity(self) -> str:
        """Differs between jobs that write other bytes."""
        return self.plan.digest + "-find"

    def finished(self, task: int) -> int | None:
        """Return how many documents a finished task has; None where it is to be done."""
        found, minhash = keys_found(self.splits[0], self.plan, task), self.plan.settings.minhash
        return found // minhash[0] if found and minhash else found

    def run(self, task: int, report: Report) -> int:
        """Store the keys of the task's documents; return how many there are.

        Raises:
            InputError: an input changed since it was planned, or cannot be read.
        """
        pa.set_cpu_count(1)  # parallelism is the runner's
        try:
            excluded = self.excluded and self.excluded.fresh()
            units = self.plan.units_of(task)
            batches = read_units(self.inputs, units, self.read, excluded)
            bands, rows = self.plan.settings.minhash or (1, 0)
            keys = (
                find_band_keys(batches, bands, rows, report) if rows else find_keys(batches, report)
            )
            count = write_keys(self.splits[0], self.plan, task, keys)
        except OlmError:
            self.check_unchanged(task)
            raise
        self.check_unchanged(task)
        finish_keys(self.splits[0], self.plan, task, count)
        return count // bands


class TokenizeJob(PlanJob):
    """Writes the shards of each task."""

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """The encoder, made once a process."""
        settings = self.plan.settings
        if self.read.chat is not None:
            chats: TextEncoder = chat_reader().encoder(self.tokenizer, self.read.chat)
            return chats
        return make_encoder(self.encoder, self.tokenizer, settings.special, self.routed)

    def prepare(self) -> None:
        """Load the encoder. See `runners.base.Job.prepare`."""
        with suppress(OlmError):  # the first task raises it again, and is asked where
            _ = self.text_encoder

    def finished(self, task: int) -> TaskResult | None:
        """Return what `run` gave some process that finished the task, or None."""
        return finished_task(self.plan, task, self.splits)

    def run(self, task: int, report: Report) -> Deferred:
        """Write the task's shards; the rest makes them durable and returns a `TaskResult`.

        Raises:
            InputError: an input changed since it was planned, or cannot be read.
        """
        pa.set_cpu_count(1)  # parallelism is the runner's
        name, settings = self.plan.shard(task), self.plan.settings
        long = self.plan.text_bytes(task) > LONG_TASK
        parts = EncodedParts(self.splits[0], self.plan.digest, name) if long else None
        pipeline = TaskPipeline(
            inputs=self.inputs,
            read=self.read,
            settings=settings,
            excluded=self.excluded and self.excluded.fresh(),
            drops=read_drops(self.splits[0], self.plan, task) if settings.dedup else None,
            evaluated=self.evaluated,
            listed={reason: [] for reason in LISTED},
            encoder=self.text_encoder,
            parts=parts,
        )
        with ExitStack() as stack:
            writers = [
                ShardWriter(
                    split,
                    name,
                    dtype=self.tokenizer.dtype,
                    vocab_size=self.tokenizer.vocab_size,
                    staging=stack.enter_context(split.staging()),
                    keep=self.read.keep_schema,
                    shuffle=settings.shuffle,
                    labels=self.read.chat is not None,
                    container=settings.container,
                )
                for split in self.splits
            ]
            staging = stack.enter_context(self.splits[0].staging())
            quarantine = Quarantine(self.splits[0], name, self.inputs, staging)
            for discard in (quarantine.discard, *(writer.discard for writer in writers)):
                stack.callback(discard)  # closes files; of what is published nothing
            try:
                accounts = pipeline.run(self.plan.units_of(task), writers, quarantine, report)
            except OlmError:  # a changed input explains most read errors
                self.check_unchanged(task)
                raise
            self.check_unchanged(task)
            staged = stack.pop_all()

        def finish() -> TaskResult:
            begun = perf_counter()
            with staged:
                quarantine.publish()
                for reason, ids in pipeline.listed.items():
                    if ids:
                        lines = "".join(f"{id}\n" for id in ids).encode()
                        self.splits[0].put(f"{LISTED[reason]}/{name}.txt", lines, limit=MAX_COUNT)
                result = self._commit(writers, accounts)
                if parts is not None:
                    parts.clear()
            report(write_us=int((perf_counter() - begun) * 1e6))
            return result

        return Deferred(finish)

    def _commit(self, writers: list[ShardWriter], accounts: list[InputAccount]) -> TaskResult:
        records = []
        for writer in reversed(writers):  # train is last, as its record stands for the whole task
            units = accounts if writer is writers[0] else []
            record = writer.commit(plan=self.plan.digest, units=units, dropped=dropped_of(units))
            records.append((record, hashlib.sha256(record.encode()).hexdigest()))
        return TaskResult(tuple(reversed(records)))
