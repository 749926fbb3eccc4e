"""The way of records through one task: units are read, encoded and appended to the shard writers.

    units -> read -> digests -> encode -> holdout? -> BOS/EOS -> writer of train | of validation
                 every record read ends in exactly one count of its input's account

Never: open, commit or publish a file of the dataset (`tokenize_job` does).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from olm_data.account import BAD_LOCATIONS, BAD_REASONS, NO_TOKENS, InputAccount
from olm_data.encoders import TextEncoder
from olm_data.runners.base import Report
from olm_data.shard import ShardWriter, docs_schema
from olm_data.sources import read_units
from olm_data.sources.base import DocumentBatch, InputFile, ReadOptions, Unit
from olm_data.tokenizer import TokenizerSpec

DIGEST_BYTES = 16
"""Bytes of a document's digest, XXH3-128: fast, and for telling texts apart, not for security."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What the tasks of a run have in common. Attributes as in `tokenize_job.TokenizeJob`."""

    inputs: tuple[InputFile, ...]
    read: ReadOptions
    tokenizer: TokenizerSpec
    encoder: TextEncoder
    holdout: int

    def run(
        self, units: list[Unit], writers: list[ShardWriter], report: Report
    ) -> list[InputAccount]:
        """Read the units and append their documents to the writers: train, then validation.

        Returns:
            an account for each input, in order of first appearance.

        Raises:
            InputError: an input cannot be read, or the encoder refuses a document.
        """
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
            for (input, reason), count in batch.skipped.items():
                accounts[input].dropped[reason] += count
            lost = len(batch.dropped) + sum(batch.skipped.values())
            assert batch.rows_in == batch.documents + lost, "a record is unaccounted for"
            tokens = self._write_batch(batch, writers, accounts, digests) if batch.documents else 0
            report(
                documents=batch.documents,
                text_bytes=len(batch.data),
                tokens=tokens,
                dropped=lost,
                bad=sum(drop.reason in BAD_REASONS for drop in batch.dropped),
            )
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

        encoded = self.encoder.encode(batch.data, batch.offsets, place)
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
