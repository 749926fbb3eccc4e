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
from contextlib import ExitStack, suppress
from functools import cached_property
from time import perf_counter

import pyarrow as pa

from olm_data.dataset.account import InputAccount, dropped_of
from olm_data.dataset.record import RECORD
from olm_data.dataset.shard_writer import ShardWriter
from olm_data.encoders import TextEncoder, make_encoder
from olm_data.errors import OlmError
from olm_data.runners.base import Report, Rest
from olm_data.tokenization.committed import TaskResult, committed
from olm_data.tokenization.dedup import read_drops
from olm_data.tokenization.pipeline import Pipeline
from olm_data.tokenization.plan_job import PlanJob
from olm_data.tokenization.quarantine import Quarantine


class TokenizeJob(PlanJob):
    """Writes the shards of each task."""

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """The encoder, made once a process."""
        settings = self.plan.settings
        return make_encoder(self.encoder, self.tokenizer, settings.special, self.routed)

    def prepare(self) -> None:
        """Load the encoder. See `runners.base.Job.prepare`."""
        with suppress(OlmError):  # the first task raises it again, and is asked where
            _ = self.text_encoder

    def finished(self, task: int) -> TaskResult | None:
        """Return what `run` gave some process that finished the task, or None. See `committed`."""
        return committed(self.plan, task, self.splits)

    def run(self, task: int, report: Report) -> Rest:
        """Write the task's shards; the rest makes them durable and returns a `TaskResult`.

        Raises:
            InputError: an input changed since it was planned, or cannot be read.
        """
        pa.set_cpu_count(1)  # parallelism is the runner's
        splits, settings = self.splits, self.plan.settings
        drops = read_drops(splits[0], self.plan, task) if settings.dedup else None
        with ExitStack() as stack:
            writers = [
                ShardWriter(
                    split,
                    self.plan.shard(task),
                    dtype=self.tokenizer.dtype,
                    vocab_size=self.tokenizer.vocab_size,
                    staging=stack.enter_context(split.staging()),
                    keep=self.read.keep_schema,
                    shuffle=settings.shuffle,
                    container=settings.container,
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
                accounts = Pipeline(self, self.text_encoder, drops).run(
                    self.plan.units_of(task), writers, quarantine, report
                )
            except BaseException as error:
                for writer in writers:
                    writer.discard()
                quarantine.discard()
                if isinstance(error, OlmError):  # a changed input explains most read errors
                    self.check_unchanged(task)
                raise
            self.check_unchanged(task)
            staged = stack.pop_all()

        def finish() -> TaskResult:
            begun = perf_counter()
            with staged:
                quarantine.publish()
                result = self._commit(writers, accounts)
            report(write_us=int((perf_counter() - begun) * 1e6))
            return result

        return Rest(finish)

    def _commit(self, writers: list[ShardWriter], accounts: list[InputAccount]) -> TaskResult:
        plan, validation = self.plan.digest, None
        if len(writers) == 2:  # first, as the train record stands for the whole task
            record = writers[1].commit(plan=plan, units=[], dropped={})
            validation = (record, _sha256(self.splits[1].read(record.name + RECORD)))
        record = writers[0].commit(plan=plan, units=accounts, dropped=dropped_of(accounts))
        return TaskResult((record, _sha256(self.splits[0].read(record.name + RECORD))), validation)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
