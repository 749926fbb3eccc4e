"""One task of a tokenise run, in a worker: a few units of input become one shard of each split.

    read_units -> hash documents -> split by hash -> encode -> BOS/EOS -> ShardWriter train
                                                                        -> ShardWriter validation
               -> bad records -> Quarantine

The shard depends on the task alone. Every record of the input is a document of one split or a drop
with a reason; the commit record of the train shard carries that account for each input. Never: a
Python loop over tokens, text kept beyond its batch, a shard committed from an input that changed
while it was read.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Literal

import pyarrow as pa

from olm_data.dataset.manifest import EXCLUDED, MAX_IDS, VALIDATION
from olm_data.dataset.plan import Plan
from olm_data.dataset.record import RECORD
from olm_data.dataset.shard_writer import ShardWriter
from olm_data.encoders import TextEncoder, make_encoder
from olm_data.encoders.base import SpecialPolicy
from olm_data.encoders.code_points import Ranges
from olm_data.errors import InputError, OlmError, ValidationError
from olm_data.runners.base import Report, Rest
from olm_data.select.selection import IdSet
from olm_data.sources import current_revision, read_units
from olm_data.sources.account import InputAccount, pack
from olm_data.sources.base import InputFile, ReadOptions, Unit
from olm_data.storage.store import STAGING_PREFIX, WORKER_PREFIX, Store
from olm_data.tokenization.committed import TaskResult, committed
from olm_data.tokenization.dedup import find_keys, read_drops, read_keys, write_keys
from olm_data.tokenization.pipeline import Pipeline
from olm_data.tokenization.quarantine import Quarantine
from olm_data.tokenizer.tokenizer import TokenizerSpec


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """All tasks of one run. See `runners.base.Job`.

    Attributes:
        plan: the plan.
        inputs, read: what to read and how.
        tokenizer: the tokenizer.
        encoder: name of the encoder plug-in, already chosen.
        routed: code points whose documents are encoded by the reference.
        special: what to do with text that spells a special token.
        holdout: a document is held out if its content hash (uint64) is below this; 0 for none.
        shuffle: seed of the order of the documents in each shard, or None for input order.
        output: root of the dataset's store; an absolute path if it is local.
        single_writer: nobody else writes there; see `Store`.
        duplicates: `find` them in a first pass, which writes no shard; `drop` those that were
            found; or `keep` all documents.
        worker: name of the process that runs tasks beside the parent, or None in the parent's own
            processes. Not part of what is stored.
    """

    plan: Plan
    inputs: tuple[InputFile, ...]
    read: ReadOptions
    tokenizer: TokenizerSpec
    encoder: str
    special: SpecialPolicy
    holdout: int
    routed: Ranges = ()
    shuffle: int | None = None
    output: str
    single_writer: bool = False
    duplicates: Literal["keep", "find", "drop"] = "keep"
    worker: str | None = None

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """The encoder, made once a process."""
        return make_encoder(self.encoder, self.tokenizer, self.special, self.routed)

    @cached_property
    def splits(self) -> list[Store]:
        """The stores of the splits: train, and validation if something is held out."""
        prefix = STAGING_PREFIX if self.worker is None else f"{WORKER_PREFIX}{self.worker}~"
        single = self.single_writer
        store = Store(self.output, single_writer=single, staging_prefix=prefix)
        return [store] if self.holdout == 0 else [store, store.child(VALIDATION)]

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

    def to_json(self) -> dict[str, Any]:
        """Return all that a worker elsewhere needs beside plan.json and tokenizer.json."""
        return {
            "plan": self.plan.digest,
            "inputs": [item.to_json() for item in self.inputs],
            "read": self.read.to_json() | {"batch_bytes": self.read.batch_bytes},
            "tokenizer": self.tokenizer.to_json(),
            "encoder": self.encoder,
            "routed": [list(stretch) for stretch in self.routed],
            "special": self.special,
            "holdout": self.holdout,
            "single_writer": self.single_writer,
            "shuffle": self.shuffle,
            "duplicates": self.duplicates,
        }

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], *, plan: Plan, tokenizer_json: bytes, output: str
    ) -> TokenizeJob:
        """Return the job that `to_json` described.

        Raises:
            ValidationError: the tokenizer is another one than the job's.
        """
        return cls(
            plan=plan,
            inputs=tuple(InputFile.from_json(item) for item in value["inputs"]),
            read=ReadOptions.from_json(value["read"]),
            tokenizer=TokenizerSpec.from_json(value["tokenizer"], tokenizer_json),
            encoder=value["encoder"],
            routed=tuple((first, last) for first, last in value["routed"]),
            special=value["special"],
            holdout=value["holdout"],
            shuffle=value["shuffle"],
            output=output,
            single_writer=value["single_writer"],
            duplicates=value["duplicates"],
        )

    @property
    def identity(self) -> str:
        """The plan's digest, and which of the two passes over it."""
        return self.plan.digest + ("-find" if self.duplicates == "find" else "")

    def prepare(self) -> None:
        """Load the encoder. See `runners.base.Job.prepare`."""
        with suppress(OlmError):  # the first task raises it again, and is asked where
            _ = self.text_encoder

    def describe(self, task: int) -> str:
        """Return the task's inputs in words."""
        return self.plan.describe(task)

    def beside(self, worker: str) -> TokenizeJob:
        """Return the job for a process beside the parent's own. See `runners.base.StoredJob`."""
        return replace(self, worker=worker)

    def finished(self, task: int) -> TaskResult | int | None:
        """Return what `run` gave some process that finished the task, or None. See `committed`."""
        if self.duplicates == "find":
            keys = read_keys(self.splits[0], self.plan, task)
            return None if keys is None else len(keys[0])
        return committed(self.plan, task, self.splits)

    def run(self, task: int, report: Report) -> Rest | int:
        """Write the task's shards. See `runners.base.Job.run`.

        Returns:
            what makes the shards durable and returns the commit records (`TaskResult`); of the
            pass that finds duplicates, the number of documents.

        Raises:
            InputError: an input changed since it was planned, or cannot be read.
        """
        pa.set_cpu_count(1)  # parallelism is the runner's
        start, stop = self.plan.tasks[task]
        units = [Unit.from_json(list(unit)) for unit in self.plan.units[start:stop]]
        splits = self.splits
        if self.duplicates == "find":
            return self._find(task, units, report)
        drops = None
        if self.duplicates == "drop":
            drops = read_drops(splits[0], self.plan, task)
        with ExitStack() as stack:
            writers = [
                ShardWriter(
                    split,
                    self.plan.shard(task),
                    dtype=self.tokenizer.dtype,
                    vocab_size=self.tokenizer.vocab_size,
                    staging=stack.enter_context(split.staging()),
                    keep=self.read.keep_schema,
                    shuffle=self.shuffle,
                    container=self.plan.container,
                )
                for split in splits
            ]
            quarantine = Quarantine(
                splits[0],
                self.plan.shard(task),
                self.inputs,
                stack.enter_context(splits[0].staging()),
            )
            try:
                excluded = self.excluded and self.excluded.fresh()
                pipeline = Pipeline(
                    inputs=self.inputs,
                    read=self.read,
                    tokenizer=self.tokenizer,
                    encoder=self.text_encoder,
                    holdout=self.holdout,
                    excluded=excluded,
                    drops=drops,
                )
                accounts = pipeline.run(units, writers, quarantine, report)
                if excluded is not None:
                    accounts[0].excluded = pack(excluded.found)
            except BaseException as error:
                for writer in writers:
                    writer.discard()
                quarantine.discard()
                if isinstance(error, OlmError):  # a changed input explains most read errors
                    self._check_unchanged(task)
                raise
            self._check_unchanged(task)
            staged = stack.pop_all()

        def finish() -> TaskResult:
            begun = perf_counter()
            with staged:
                quarantine.publish()
                result = self._commit(splits, writers, accounts)
            report(write_us=int((perf_counter() - begun) * 1e6))
            return result

        return Rest(finish)

    def _find(self, task: int, units: list[Unit], report: Report) -> int:
        """Store the keys of the task's documents; return how many there are."""
        try:
            excluded = self.excluded and self.excluded.fresh()
            keys = find_keys(read_units(self.inputs, units, self.read, excluded), report)
        except OlmError:
            self._check_unchanged(task)
            raise
        self._check_unchanged(task)
        write_keys(self.splits[0], self.plan, task, keys)
        return len(keys[0])

    def _commit(
        self, splits: list[Store], writers: list[ShardWriter], accounts: list[InputAccount]
    ) -> TaskResult:
        dropped: Counter[str] = Counter()
        for account in accounts:
            dropped.update(account.dropped)
        validation = None
        if len(writers) == 2:  # first, as the train record stands for the whole task
            record = writers[1].commit(plan=self.plan.digest, units=[], dropped={})
            validation = (record, _sha256(splits[1].read(record.name + RECORD)))
        record = writers[0].commit(
            plan=self.plan.digest,
            units=[account.to_json() for account in accounts],
            dropped=dict(dropped),
        )
        return TaskResult((record, _sha256(splits[0].read(record.name + RECORD))), validation)

    def _check_unchanged(self, task: int) -> None:
        for index in self.plan.inputs_of(task):
            source = self.inputs[index]
            if current_revision(source) != source.revision:
                raise InputError(
                    "an input changed while it was being read",
                    where=source.path,
                    why="its shard would mix two versions of the file",
                    fix="once the file no longer changes, delete the output and run again",
                )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
