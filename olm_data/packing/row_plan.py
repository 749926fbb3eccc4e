"""Rows as lists of pieces: what packing decides, stored as three memory-mapped arrays.

    documents of a dataset, window by window -> pieces of some rows -> ... of the next
                                                    `-> starts, lengths, ends (.npy)
    RowPlan.open(folder) -> .pieces(row)     -> the reader copies them one behind the other

A piece is a stretch of one document. The pieces of a row have at most S + 1 tokens, the last of
which is only a label; after each piece that ends before that, a document ends. A row with fewer
tokens is padded. A source that is packed as one stream of all its documents needs no plan
(`packing.py`). Never: hold more in memory than a window of documents and a part of their rows,
however long they are, or read a token.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olm_data.dataset.container import HEADER_BYTES, mapped_bytes, npy_header
from olm_data.dataset.shard import Verify
from olm_data.errors import ValidationError
from olm_data.packing.best_fit import Int64, best_fit
from olm_data.storage.disk import io_errors
from olm_data.storage.scratch import scratch
from olm_data.storage.store import Store

WINDOW = 1 << 22
"""Documents packed at once: the memory of a plan does not grow with the dataset."""

PART = 1 << 20
"""Rows given at once, where they can be made one after another."""

_COPIED = 4 << 20  # bytes
_CACHED = 1 << 15  # numbers hashed together: they stay in the processor's cache
_STEP = np.uint64(0x9E3779B97F4A7C15)

STARTS, LENGTHS, ENDS = "starts.npy", "lengths.npy", "ends.npy"
FILES: dict[str, Any] = {STARTS: np.uint64, LENGTHS: np.uint32, ENDS: np.uint64}


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some consecutive rows.

    Attributes:
        starts: int64 [p], first token of each piece, counted over the dataset.
        lengths: int64 [p], tokens of each piece.
        counts: int64 [rows], pieces of each row.
    """

    starts: Int64
    lengths: Int64
    counts: Int64


@dataclass(slots=True)
class Waste:
    """What a packing costs, summed over a dataset.

    Attributes:
        rows: rows made.
        tokens: tokens in them that are inputs.
        padding: places without a token.
        cut_long: documents cut because they are longer than a row.
        cut_short: documents cut though they would have fitted into one row.
        dropped: tokens in no row.
    """

    rows: int = 0
    tokens: int = 0
    padding: int = 0
    cut_long: int = 0
    cut_short: int = 0
    dropped: int = 0


def pack_best_fit(
    starts: Int64, lengths: Int64, sequence_length: int, *, key: int, min_tail: int, waste: Waste
) -> Iterator[PackedRows]:
    """Pack one window of documents by best-fit decreasing, the full rows of long ones first.

    Args:
        starts, lengths: int64 [d], first token and number of tokens of each document.
        key: decides which documents of equal length meet which others.
        min_tail: remainders of a cut document with fewer tokens are dropped.
        waste: is added to.
    """
    long = np.flatnonzero(lengths >= sequence_length)
    full = lengths[long] // sequence_length
    yield from _stretches(starts[long], lengths[long], full, sequence_length)
    first, tails = starts.copy(), lengths.copy()
    first[long] += full * sequence_length
    tails[long] -= full * sequence_length
    keep = tails > 0
    keep[long] &= tails[long] >= min_tail
    first, tails = first[keep], tails[keep]
    packed = best_fit(tails, _mixed(first, key), sequence_length)
    rows, used = len(packed.starts) - 1, int(tails.sum())
    waste.rows += int(full.sum()) + rows
    waste.tokens += int(full.sum()) * sequence_length + used
    waste.padding += rows * sequence_length - used
    waste.cut_long += int((lengths[long] > sequence_length).sum())
    waste.dropped += int(lengths.sum()) - int(full.sum()) * sequence_length - used
    yield PackedRows(first[packed.order], tails[packed.order], np.diff(packed.starts))


def pack_documents(
    starts: Int64, lengths: Int64, sequence_length: int, *, waste: Waste
) -> Iterator[PackedRows]:
    """Give each document rows of its own, padded; one longer than a row goes on in the next."""
    counts = -(-lengths // sequence_length)
    rows, tokens = int(counts.sum()), int(lengths.sum())
    waste.rows += rows
    waste.tokens += tokens
    waste.padding += rows * sequence_length - tokens
    waste.cut_long += int((lengths > sequence_length).sum())
    yield from _stretches(starts, lengths, counts, sequence_length)


def _stretches(
    starts: Int64, lengths: Int64, counts: Int64, sequence_length: int
) -> Iterator[PackedRows]:
    """Yield the first `counts` [d] stretches of S tokens of each document, a row each.

    A stretch after which the document goes on has one token more: its last label.
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    for low in range(0, total, PART):
        row = np.arange(low, min(low + PART, total), dtype=np.int64)
        document = np.searchsorted(ends, row, side="right")
        inside = (row - (ends - counts)[document]) * sequence_length
        size = np.minimum(sequence_length + 1, lengths[document] - inside)
        yield PackedRows(starts[document] + inside, size, np.ones(len(row), np.int64))


class StreamPacker:
    """Packs chosen documents as one stream, row r from its token r * S, across windows.

    The same geometry as `packing.py` has for all documents of a dataset. What is left at the end
    and fills no row is dropped.
    """

    def __init__(self, sequence_length: int, waste: Waste) -> None:
        self._length, self._waste, self._past = sequence_length, waste, 0
        self._starts: Int64 = np.zeros(0, np.int64)
        self._lengths: Int64 = np.zeros(0, np.int64)

    def pack(self, starts: Int64, lengths: Int64) -> Iterator[PackedRows]:
        """Yield the rows that the stream has now and had not before."""
        starts = np.concatenate([self._starts, starts[lengths > 0]])
        lengths = np.concatenate([self._lengths, lengths[lengths > 0]])
        size, ends = self._length, np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        rows = max(0, (total - 1) // size)
        for row in range(0, rows, PART):
            yield self._rows(starts, lengths, ends, row, min(row + PART, rows))
        self._count_cuts(lengths, ends, rows * size)
        self._keep(starts, lengths, ends, rows * size)
        self._waste.rows += rows
        self._waste.tokens += rows * size
        self._waste.dropped = total - (rows * size + 1 if rows else 0)

    def _rows(self, starts: Int64, lengths: Int64, ends: Int64, i: int, j: int) -> PackedRows:
        """Return rows i .. j-1 of what is at hand; neighbours share the token on their border."""
        size = self._length
        low = np.arange(i, j, dtype=np.int64) * size
        first = np.searchsorted(ends, low, side="right")
        last = np.searchsorted(ends, low + size, side="right")
        counts = last - first + 1
        document = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        before = (ends - lengths)[document]
        begin = np.maximum(np.repeat(low, counts), before)
        stop = np.minimum(np.repeat(low + size + 1, counts), ends[document])
        return PackedRows(starts[document] + begin - before, stop - begin, counts)

    def _count_cuts(self, lengths: Int64, ends: Int64, used: int) -> None:
        """Count the documents that begin in these rows and go on in another row than they begin."""
        begin = ends - lengths
        fresh = (begin >= 0) & (begin < used)
        if self._past and len(fresh):
            fresh[0] = False  # the rest of a document that began in earlier rows
        size = self._length
        apart = fresh & (begin // size != (ends - 1) // size)
        self._waste.cut_long += int((apart & (lengths > size)).sum())
        self._waste.cut_short += int((apart & (lengths <= size)).sum())

    def _keep(self, starts: Int64, lengths: Int64, ends: Int64, used: int) -> None:
        at = int(np.searchsorted(ends, used, side="right"))
        self._starts, self._lengths = starts[at:].copy(), lengths[at:].copy()
        if at < len(starts):
            gone = used - int(ends[at] - lengths[at])
            self._starts[0] += gone
            self._lengths[0] -= gone
            self._past = gone


class RowPlan:
    """A stored plan, memory-mapped.

    Attributes:
        rows: how many rows there are.
        starts: uint64 [p], first token of each piece, counted over the dataset.
        lengths: uint32 [p], tokens of each piece.
        ends: uint64 [rows], pieces up to and with each row.
    """

    def __init__(self, starts: NDArray[Any], lengths: NDArray[Any], ends: NDArray[Any]) -> None:
        self.starts, self.lengths, self.ends = starts, lengths, ends
        self.rows = len(ends)

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return (first token, tokens) of each piece of a row, in order."""
        low, high = int(self.ends[row - 1]) if row else 0, int(self.ends[row])
        starts, lengths = self.starts[low:high].tolist(), self.lengths[low:high].tolist()
        return list(zip(starts, lengths, strict=True))

    def rows_with(self, start: int, stop: int) -> Int64:
        """Return the rows, ascending int64, that hold any of the dataset's tokens [start, stop).

        Looks at every piece once, some at a time: pieces stand in the order of rows.
        """
        found = []
        for low in range(0, len(self.starts), WINDOW):
            starts = self.starts[low : low + WINDOW]
            here = starts < np.uint64(stop)
            here &= starts + self.lengths[low : low + WINDOW] > np.uint64(start)
            found.append(np.flatnonzero(here) + low)
        pieces = np.concatenate(found) if found else np.zeros(0, np.int64)
        rows = np.searchsorted(self.ends, pieces.astype(np.uint64), side="right")
        return np.unique(rows).astype(np.int64)

    @classmethod
    def open(
        cls,
        store: Store,
        rows: int,
        pieces: int,
        sha256: Mapping[str, str],
        *,
        verify: Verify = "lazy",
    ) -> RowPlan:
        """Open the plan in `store`, which must have just so many rows and pieces.

        A remote plan is copied into a temporary folder and mapped from there; the space is free
        again when the plan is let go.

        Args:
            sha256: digest of each file, by name; checked, of local files unless `verify` is off.

        Raises:
            ValidationError: a file is missing, damaged, or of another size.
        """
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(scratch()) if store.remote else Path(store.root)
            arrays = []
            for name, dtype in FILES.items():
                count = rows if name == ENDS else pieces
                try:
                    header = npy_header(np.dtype(dtype), count)
                    size, wanted = store.size(name), file_sizes(rows, pieces)[name]
                    if size != wanted:
                        raise ValueError(
                            "it is missing" if size is None else f"{size:,} bytes, not {wanted:,}"
                        )
                    seen = _copy(store, name, folder / name) if store.remote else None
                    data = mapped_bytes(Store(folder) if store.remote else store, name)
                    if len(data) != wanted or bytes(data[: len(header)]) != header:
                        raise ValueError(f"it is not an array of {count:,} {np.dtype(dtype)}")
                    array = data[len(header) :].view(dtype)
                    if seen is None and verify != "off":
                        seen = store.sha256(name)
                    if seen not in (None, sha256[name]):
                        raise ValueError("its digest is not the one in the lock")
                except ValidationError:
                    raise
                except (OSError, ValueError) as error:
                    raise _damaged(store.url(name), str(error)) from error
                arrays.append(array)
            return cls(*arrays)

    @staticmethod
    def digests(folder: Path) -> dict[str, str]:
        """Return the sha256 of each file of a plan, by name."""
        found = {}
        for name in FILES:
            with open(folder / name, "rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return found


def file_sizes(rows: int, pieces: int) -> dict[str, int]:
    """Return the bytes of each file of a plan with so many rows and pieces, by name."""
    counts = {name: rows if name == ENDS else pieces for name in FILES}
    return {
        name: HEADER_BYTES + count * np.dtype(FILES[name]).itemsize
        for name, count in counts.items()
    }


def write(folder: Path, parts: Iterable[PackedRows]) -> tuple[int, int]:
    """Write the rows of `parts` as a plan, durable; return how many rows and pieces there are.

    Raises:
        ResourceError: the disk is full or fails.
    """
    rows = pieces = 0
    with (
        io_errors(str(folder), writing=True),
        open(folder / STARTS, "wb") as starts,
        open(folder / LENGTHS, "wb") as lengths,
        open(folder / ENDS, "wb") as ends,
    ):
        files = (starts, lengths, ends)
        for file in files:
            file.write(bytes(HEADER_BYTES))
        for part in parts:
            starts.write(part.starts.astype("<u8").tobytes())
            lengths.write(part.lengths.astype("<u4").tobytes())
            ends.write((np.cumsum(part.counts) + pieces).astype("<u8").tobytes())
            rows += len(part.counts)
            pieces += len(part.starts)
        for file, dtype, count in zip(files, FILES.values(), (pieces, pieces, rows), strict=True):
            file.seek(0)
            file.write(npy_header(np.dtype(dtype), count))
            file.flush()
            os.fsync(file.fileno())
    return rows, pieces


def _copy(store: Store, name: str, path: Path) -> str:
    """Copy a file of a remote store to `path`; return the sha256 of what was copied."""
    seen = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in store.pieces(name, _COPIED):
            seen.update(piece)
            with io_errors(str(path), writing=True):
                file.write(piece)
    return seen.hexdigest()


def _mixed(values: Int64, key: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value: the finaliser of SplitMix64 (Steele et al., 2014)."""
    mixed = np.empty(len(values), np.uint64)
    for low in range(0, len(values), _CACHED):
        z = mixed[low : low + _CACHED]
        np.multiply(values[low : low + _CACHED].view(np.uint64), _STEP, out=z)
        z += np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z ^= z >> np.uint64(shift)
            z *= np.uint64(factor)
        z ^= z >> np.uint64(31)
    return mixed


def _damaged(url: str, why: str) -> ValidationError:
    return ValidationError(
        "a row plan of the mixture is missing or damaged",
        where=url,
        why=why,
        fix="run olm-data mix again: it writes the same plan",
    )
