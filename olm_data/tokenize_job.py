"""One task of a tokenise run, in a worker: a few units of input become one shard of each split.

    read_units -> hash documents -> split by hash -> encode -> BOS/EOS -> ShardWriter train
                                                                        -> ShardWriter validation

The shard depends on the task alone. Every record of the input is a document of one split or a drop
with a reason; the commit record of the train shard carries that account for each input. Never: a
Python loop over tokens, text kept beyond its batch, a shard committed from an input that changed
while it was read.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from olm_data.dataset import VALIDATION
from olm_data.encoders import TextEncoder, make_encoder
from olm_data.encoders.base import SpecialPolicy
from olm_data.errors import InputError, OlmError
from olm_data.plan import Plan, shard_name
from olm_data.runners.base import Report
from olm_data.shard import DOCS, ENDS, RECORD, TOKENS, ShardRecord, ShardWriter, docs_schema
from olm_data.sources import current_revision, read_units
from olm_data.sources.base import DocumentBatch, InputFile, ReadOptions, Unit
from olm_data.store import Store
from olm_data.tokenizer import TokenizerSpec

DIGEST_BYTES = 16
"""Bytes of a document's digest, XXH3-128: fast, and for telling texts apart, not for security."""

NO_TOKENS = "no_tokens"
"""Drop reason of this stage: the tokenizer makes no token of the text (it normalises all away)."""

BAD_REASONS = frozenset({"malformed", "invalid_utf8", "no_text"})
"""Drops that count against `--max-bad`; an empty document is no fault of the data."""

BAD_LOCATIONS = 10
"""Locations of bad records kept for each input of a task."""


@dataclass
class InputAccount:
    """What became of one input's records in one task. Every record read is in one of the counts.

    Attributes:
        input: index of the input in the plan.
        units: [start, stop) of the units read.
        documents: documents of the train split.
        held_out: documents of the validation split.
        dropped: records dropped, by reason.
        special_hits: strings in the text that spell a special token.
        bad: `[position, reason, detail]` of the first bad records.
        sha256: of the XXH3-128 digests of all documents' texts, concatenated in order.
    """

    input: int
    units: list[list[int]] = field(default_factory=list)
    documents: int = 0
    held_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    special_hits: int = 0
    bad: list[list[Any]] = field(default_factory=list)
    sha256: str = ""

    @property
    def documents_in(self) -> int:
        """All records read."""
        return self.documents + self.held_out + sum(self.dropped.values())

    def to_json(self) -> dict[str, Any]:
        """Return the account as stored in the commit record."""
        return {
            "input": self.input,
            "units": self.units,
            "documents": self.documents,
            "held_out": self.held_out,
            "dropped": dict(sorted(self.dropped.items())),
            "special_hits": self.special_hits,
            "bad": self.bad,
            "sha256": self.sha256,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> InputAccount:
        """Return the account that `to_json` wrote."""
        return cls(**{**value, "dropped": Counter(value["dropped"])})


@dataclass(frozen=True)
class TaskResult:
    """The commit records of a task, each with its file's sha256; no validation if not asked."""

    train: tuple[ShardRecord, str]
    validation: tuple[ShardRecord, str] | None


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """All tasks of one run. See `runners.base.Job`.

    Attributes:
        plan: the plan.
        inputs, read: what to read and how.
        tokenizer: the tokenizer.
        encoder: name of the encoder plug-in, already chosen.
        special: what to do with text that spells a special token.
        holdout: a document is held out if its content hash (uint64) is below this; 0 for none.
        output: root of the dataset's store.
    """

    plan: Plan
    inputs: tuple[InputFile, ...]
    read: ReadOptions
    tokenizer: TokenizerSpec
    encoder: str
    special: SpecialPolicy
    holdout: int
    output: str

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """The encoder, made once a process."""
        return make_encoder(self.encoder, self.tokenizer, self.special)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "text_encoder"}

    def describe(self, task: int) -> str:
        """Return the task's inputs in words."""
        return self.plan.describe(task)

    def run(self, task: int, report: Report) -> TaskResult:
        """Write the task's shards. See `runners.base.Job.run`.

        Raises:
            InputError: an input changed since it was planned, or cannot be read.
        """
        pa.set_cpu_count(1)  # parallelism is the runner's
        start, stop = self.plan.tasks[task]
        units = [Unit.from_json(list(unit)) for unit in self.plan.units[start:stop]]
        store = Store(self.output)
        splits = [store] if self.holdout == 0 else [store, store.child(VALIDATION)]
        with ExitStack() as stack:
            writers = [
                ShardWriter(
                    split,
                    shard_name(task),
                    dtype=self.tokenizer.dtype,
                    vocab_size=self.tokenizer.vocab_size,
                    staging=stack.enter_context(split.staging()),
                    keep=self.read.keep_schema,
                )
                for split in splits
            ]
            try:
                accounts = self._write(units, writers, report)
            except BaseException as error:
                for writer in writers:
                    writer.discard()
                if isinstance(error, OlmError):  # a changed input explains most read errors
                    self._check_unchanged(task)
                raise
            self._check_unchanged(task)
            return self._commit(splits, writers, accounts)

    def _write(
        self, units: list[Unit], writers: list[ShardWriter], report: Report
    ) -> list[InputAccount]:
        accounts: dict[int, InputAccount] = {}
        digests: dict[int, Any] = {}
        for unit in units:
            account = accounts.setdefault(unit.input, InputAccount(unit.input))
            account.units.append([unit.start, unit.stop])
            digests.setdefault(unit.input, hashlib.sha256())
        for batch in read_units(self.inputs, units, self.read):
            for drop in batch.dropped:
                account = accounts[drop.input]
                account.dropped[drop.reason] += 1
                if drop.reason in BAD_REASONS and len(account.bad) < BAD_LOCATIONS:
                    account.bad.append([drop.position, drop.reason, drop.detail])
            assert batch.rows_in == batch.documents + len(batch.dropped), (
                "a record is unaccounted for"
            )
            tokens = self._write_batch(batch, writers, accounts, digests) if batch.documents else 0
            report(batch.documents, len(batch.data), tokens)
        for index, account in accounts.items():
            account.sha256 = digests[index].hexdigest()
        return list(accounts.values())

    def _write_batch(
        self,
        batch: DocumentBatch,
        writers: list[ShardWriter],
        accounts: dict[int, InputAccount],
        digests: dict[int, Any],
    ) -> int:
        raw = document_digests(batch.data, batch.offsets)
        hashes = content_hashes(raw)

        def place(k: int) -> str:
            source = self.inputs[int(batch.inputs[k])]
            return f"{source.path}, {source.position} {int(batch.positions[k])}"

        encoded = self.text_encoder.encode(batch.data, batch.offsets, place)
        empty = np.diff(encoded.offsets) == 0
        held_out = hashes < np.uint64(self.holdout) if self.holdout else np.zeros(len(hashes), bool)
        rows = document_rows(batch, hashes, self.read.keep_schema)
        for first, last in runs(batch.inputs):
            account = accounts[int(batch.inputs[first])]
            digests[account.input].update(raw[first * DIGEST_BYTES : last * DIGEST_BYTES])
            none, held = empty[first:last], held_out[first:last]
            if none.any():
                account.dropped[NO_TOKENS] += int(none.sum())
            account.held_out += int((held & ~none).sum())
            account.documents += int((~held & ~none).sum())
        # hits are counted for a whole batch; the account of its first input carries them
        accounts[int(batch.inputs[0])].special_hits += encoded.special_hits
        total = 0
        for writer, chosen in zip(writers, (~held_out & ~empty, held_out & ~empty), strict=False):
            ids, offsets = delimit(
                encoded.ids,
                encoded.offsets,
                chosen,
                bos=self.tokenizer.bos,
                eos=self.tokenizer.eos,
            )
            some = rows if chosen.all() else rows.take(_column(np.flatnonzero(chosen), pa.int64()))
            writer.append(ids, offsets, some)
            total += len(ids)
        return total

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
                    fix="when the file is at rest, delete the output and run the command again",
                )


def committed(plan: Plan, task: int, splits: list[Store]) -> TaskResult | None:
    """Return the records of a task that an earlier run finished, or None if it must be (re)done.

    A task is finished when each split has a commit record of this plan whose files have the
    recorded sizes; digests are `verify`'s business.
    """
    found = [_committed_split(plan, shard_name(task), store) for store in splits]
    if any(item is None for item in found):
        return None
    train = found[0]
    assert train is not None
    return TaskResult(train, found[1] if len(found) == 2 else None)


def _committed_split(plan: Plan, name: str, store: Store) -> tuple[ShardRecord, str] | None:
    try:
        data = store.read(name + RECORD)
        record = msgspec.json.decode(data, type=ShardRecord)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    if record.name != name or record.plan != plan.digest:
        return None
    for kind in (TOKENS, ENDS, DOCS) if record.tokens else ():
        info = record.files.get(kind.split(".")[1])
        if info is None or store.size(name + kind) != info.bytes:
            return None
    return record, _sha256(data)


def document_digests(data: np.ndarray, offsets: np.ndarray) -> bytes:
    """Return the XXH3-128 digest of each document, 16 bytes each, concatenated.

    Args:
        data: uint8 [n], text of the documents end to end.
        offsets: int64 [d + 1] into `data`.
    """
    view, digest = np.ascontiguousarray(data).data, xxhash.xxh3_128_digest
    at = offsets.tolist()
    return b"".join([digest(view[a:b]) for a, b in pairwise(at)])


def content_hashes(digests: bytes) -> np.ndarray:
    """Return uint64 [d]: the first 8 bytes, little-endian, of each 16-byte digest."""
    return np.frombuffer(digests, "<u8")[::2].astype(np.uint64)


def runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return the [first, last) ranges of equal neighbours in a non-empty 1-D array."""
    cuts = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(values)], strict=True))


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
        _column(batch.inputs, pa.int32()),
        _column(batch.positions, pa.int64()),
        _column(batch.text_bytes, pa.int64()),
        _column(hashes, pa.uint64()),
    ]
    if keep is not None:
        assert batch.keep is not None
        columns += batch.keep.columns
    return pa.RecordBatch.from_arrays(columns, schema=docs_schema(keep))


def _column(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return an Arrow array of the values; `pa.array` of an ndarray would import pandas first."""
    assert values.dtype == kind.to_pandas_dtype()
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def input_digest(parts: list[str]) -> str:
    """Return an input's digest: sha256 of the raw digests of its parts, one a task, in order."""
    return _sha256(b"".join(bytes.fromhex(part) for part in parts))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
