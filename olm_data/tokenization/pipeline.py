"""The way of records through one task: units are read, encoded and appended to the shard writers.

    units -> read -> digests -> | encode -> | holdout? -> BOS/EOS -> writer of train | of validation
             thread of its own  | thread    | the caller's thread
                 bad records -> quarantine
                 every record read ends in exactly one count of its input's account

Each stage takes an iterator and gives one, in order, so that a stage which leaves records out is
one more generator between two others. Only the last stage touches accounts and writers. Stages
overlap (`overlap.Ahead`); text is let go once it is encoded. Never: open, commit or publish a file
of the dataset (`job` does).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import numbers
from olm_data.dataset.account import BAD_REASONS, UNENCODABLE, InputAccount
from olm_data.dataset.docs import docs_schema
from olm_data.dataset.inputs import Unit
from olm_data.dataset.shard_writer import ShardWriter
from olm_data.encoders import Encoded, TextEncoder
from olm_data.encoders.batches import chosen_of, ids_of
from olm_data.errors import InputError, printable
from olm_data.runners.base import Report
from olm_data.select.digests import DIGEST_BYTES, content_hashes, document_digests
from olm_data.select.selection import IdSet
from olm_data.sources import read_units
from olm_data.sources.base import DocumentBatch, Drop
from olm_data.sources.buffers import choose, without
from olm_data.tokenization.accounts import Accounts
from olm_data.tokenization.batches import EncodedBatch, HashedBatch
from olm_data.tokenization.overlap import Ahead
from olm_data.tokenization.plan_job import PlanJob
from olm_data.tokenization.quarantine import Quarantine

LONG_TOKENS = 256
"""Documents longer than this on average are copied one by one, which is faster then."""

BATCHES_AHEAD = 2
"""A stage stops while it has made this many times `batch_bytes` that the next is not done with."""


@dataclass(frozen=True)
class Pipeline:
    """The stages of one task.

    Attributes:
        job: the job of the task.
        encoder: what encodes.
        drops: bool [d], which documents read are dropped as duplicates; None drops none.
    """

    job: PlanJob
    encoder: TextEncoder
    drops: np.ndarray | None = None

    def run(
        self,
        units: Sequence[Unit],
        writers: list[ShardWriter],
        quarantine: Quarantine,
        report: Report,
    ) -> list[InputAccount]:
        """Read the units and append their documents to the writers: train, then validation.

        Args:
            quarantine: gets every record that is dropped as bad.

        Returns:
            an account for each input, in order of first appearance.

        Raises:
            InputError: an input cannot be read, the encoder refuses a document, or text is not
                UTF-8 and `on_invalid` is "error".
            ValidationError: a record read is neither a document nor a drop.
        """
        job = self.job
        excluded = job.excluded and job.excluded.fresh()
        accounts = Accounts(units, job.inputs, job.read.on_invalid)
        limit = BATCHES_AHEAD * job.read.batch_bytes
        with (
            Ahead(self._read(units, excluded), size=_text_bytes, limit=limit) as hashed,
            Ahead(self._encode(hashed), size=_id_bytes, limit=limit, after=hashed) as encoded,
        ):
            clock = [0.0, 0.0]
            for batch in encoded:
                start = perf_counter()
                accounts.add(batch, quarantine)
                tokens = self._write(batch, writers, accounts)
                seconds = [hashed.busy, encoded.busy]
                report(
                    documents=len(batch.inputs),
                    text_bytes=batch.text_bytes,
                    tokens=tokens,
                    dropped=batch.lost,
                    by_reference=batch.by_reference,
                    bad=sum(drop.reason in BAD_REASONS for drop in batch.dropped),
                    read_us=int(seconds[0] * 1e6) - int(clock[0] * 1e6),
                    encode_us=int(seconds[1] * 1e6) - int(clock[1] * 1e6),
                    write_us=int((perf_counter() - start) * 1e6),
                )
                clock = seconds
                del batch  # or it would be kept while the next one is waited for
        return accounts.finished(excluded)

    def _read(
        self, units: Sequence[Unit], excluded: IdSet | None
    ) -> Generator[HashedBatch, None, None]:
        """Yield the documents of the units with their digests: first stage."""
        first = 0
        for batch in read_units(self.job.inputs, units, self.job.read, excluded):
            digests = document_digests(batch.data, batch.offsets)
            if self.drops is not None:
                kept = ~self.drops[first : first + batch.documents]
                first += batch.documents
                if len(kept) < batch.documents:
                    break
                batch = choose(batch, kept, "duplicate")
                digests = np.frombuffer(digests, f"V{DIGEST_BYTES}")[kept].tobytes()
            made = [HashedBatch(batch, digests)]
            del batch  # the text may be large: once it is encoded nobody has it
            yield made.pop()
        if self.drops is not None and first != len(self.drops):
            raise InputError(
                "the input gave other documents when it was read again",
                where=self.job.inputs[units[0].input].path,
                why="the duplicates found the first time would not be those dropped now",
                fix="once the input no longer changes, delete the output and run the command again",
            )

    def _encode(self, batches: Iterable[HashedBatch]) -> Generator[EncodedBatch, None, None]:
        """Yield the documents as ids: second stage."""
        for hashed in batches:
            encoded = self._encoded(hashed)
            del hashed  # the text may be large: it is let go before the next is waited for
            yield encoded
            del encoded

    def _encoded(self, hashed: HashedBatch) -> EncodedBatch:
        batch = hashed.batch

        def place(k: int) -> str:
            source = self.job.inputs[int(batch.inputs[k])]
            return f"{source.path}, {source.position} {int(batch.positions[k])}"

        made = Encoded(np.empty(0, np.uint32), np.zeros(1, np.int64), 0, np.empty(0, int), {}, 0)
        digests = hashed.digests
        schema = docs_schema(self.job.read.keep_schema)
        rows = pa.RecordBatch.from_arrays(
            [pa.nulls(0, kind) for kind in schema.types], schema=schema
        )
        if batch.documents:  # else it is here for what was dropped
            made = self.encoder.encode(batch.data, batch.offsets, place)
            batch, made, digests = self._left_out(batch, made, digests)
            rows = document_rows(batch, content_hashes(digests), self.job.read.keep_schema)
        return EncodedBatch(
            ids=made.ids,
            offsets=made.offsets,
            rows=rows,
            inputs=batch.inputs,
            digests=digests,
            text_bytes=len(batch.data),
            special_hits=made.special_hits,
            unknown=made.unknown,
            by_reference=made.by_reference,
            dropped=batch.dropped,
            skipped=batch.skipped,
            replaced=batch.replaced,
            rows_in=batch.rows_in,
        )

    def _left_out(
        self, batch: DocumentBatch, made: Encoded, digests: bytes
    ) -> tuple[DocumentBatch, Encoded, bytes]:
        """Drop the documents that cannot be encoded, or hold what `on_unknown` says to drop."""
        failed = np.zeros(batch.documents, bool)
        failed[list(made.failed)] = True
        unknown = (made.unknown > 0) & (self.job.read.on_unknown == "drop") & ~failed
        kept = ~(failed | unknown)
        if kept.all():
            return batch, made, digests
        drops = [
            Drop.of(
                UNENCODABLE,
                int(batch.inputs[k]),
                int(batch.positions[k]),
                printable(why),
                ids_of((batch.data, batch.offsets), k).tobytes(),
            )
            for k, why in sorted(made.failed.items())
        ]
        batch = replace(choose(batch, ~unknown, "unknown"), dropped=(*batch.dropped, *drops))
        batch = without(batch, failed[~unknown])
        ids, offsets = chosen_of((made.ids, made.offsets), kept)
        made = made._replace(ids=ids, offsets=offsets, unknown=made.unknown[kept], failed={})
        return batch, made, np.frombuffer(digests, f"V{DIGEST_BYTES}")[kept].tobytes()

    def _write(self, batch: EncodedBatch, writers: list[ShardWriter], accounts: Accounts) -> int:
        """Append a batch to the writers: last stage. Returns how many tokens."""
        if not len(batch.inputs):
            return 0
        hashes = content_hashes(batch.digests)
        empty = np.diff(batch.offsets) == 0
        below = self.job.plan.settings.holdout_below
        held_out = hashes < np.uint64(below) if below else np.zeros(len(hashes), bool)
        accounts.split(batch, empty, held_out)
        total, bos, eos = 0, self.job.tokenizer.bos, self.job.tokenizer.eos
        for writer, chosen in zip(writers, (~held_out & ~empty, held_out & ~empty), strict=False):
            ids, offsets = delimit(batch.ids, batch.offsets, chosen, bos=bos, eos=eos)
            rows = batch.rows
            if not chosen.all():
                rows = rows.take(numbers(np.flatnonzero(chosen), pa.int64()))
            writer.append(ids, offsets, rows)
            total += len(ids)
        return total


def _text_bytes(hashed: HashedBatch) -> int:
    return len(hashed.batch.data) + _raw_bytes(hashed.batch.dropped)


def _id_bytes(batch: EncodedBatch) -> int:
    return int(batch.ids.nbytes) + _raw_bytes(batch.dropped)


def _raw_bytes(drops: Iterable[Drop]) -> int:
    return sum(len(drop.raw) for drop in drops)


def delimit(
    ids: np.ndarray, offsets: np.ndarray, chosen: np.ndarray, *, bos: int | None, eos: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Take the chosen documents and put BOS before and EOS after each.

    Args:
        ids: uint32 [t], bodies end to end.
        offsets: int64 [d + 1] into `ids`.
        chosen: bool [d].
        bos, eos: ids to put, or None.

    Returns:
        ids uint32 [t'] and offsets int64 [chosen + 1].
    """
    lengths = np.diff(offsets)
    if not chosen.all():
        ids = ids[np.repeat(chosen, lengths)]
        lengths = lengths[chosen]
    extra = (bos is not None) + (eos is not None)
    ends = np.cumsum(lengths + extra)
    placed = np.concatenate([np.zeros(1, np.int64), ends])
    if extra == 0:
        return ids, placed
    out = np.empty(int(placed[-1]), np.uint32)
    if len(ids) > LONG_TOKENS * len(lengths):  # few documents: one copy each, and no mask
        starts = np.cumsum(lengths) - lengths
        for start, length, at in zip(
            starts.tolist(), lengths.tolist(), placed[:-1].tolist(), strict=True
        ):
            if bos is not None:
                out[at] = bos
                at += 1
            out[at : at + length] = ids[start : start + length]
            if eos is not None:
                out[at + length] = eos
        return out, placed
    body = np.ones(len(out), bool)
    for mark, positions in ((bos, placed[:-1]), (eos, ends - 1)):
        if mark is not None:
            out[positions] = mark
            body[positions] = False
    out[body] = ids
    return out, placed


def document_rows(
    batch: DocumentBatch, hashes: np.ndarray, keep: pa.Schema | None
) -> pa.RecordBatch:
    """Return a batch's rows of `docs.parquet`: the five columns of the format, then kept ones."""
    ids = batch.ids if batch.ids is not None else pa.nulls(batch.documents, pa.string())
    columns = [
        ids.cast(pa.string()),
        numbers(batch.inputs, pa.int32()),
        numbers(batch.positions, pa.int64()),
        numbers(batch.text_bytes, pa.int64()),
        numbers(hashes, pa.uint64()),
    ]
    if keep is not None:
        assert batch.keep is not None
        columns += batch.keep.columns
    return pa.RecordBatch.from_arrays(columns, schema=docs_schema(keep))
