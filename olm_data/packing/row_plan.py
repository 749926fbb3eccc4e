"""Rows as lists of pieces, stored as three memory-mapped arrays: the file format of a row plan.

    PackedRows, part by part --write--> starts, lengths, ends (.npy); PlanInfo in the lock
    RowPlan.open(folder) -> .pieces(row)     -> the reader copies them one behind the other

The pieces of a row have at most S + 1 tokens, the last of which is only a label; after each piece
that ends before that, a document ends. A row with fewer tokens is padded.

Also: from a dataset to its row plan: documents read from the shards' ends, a window at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import Size, digest, sha256_file
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.record import HEADER_BYTES, mapped_bytes, npy_header
from olm_data.dataset.shard import Verify
from olm_data.dataset.view import ViewScan
from olm_data.errors import ValidationError
from olm_data.packing.base import Int64, PackedRows, Packing, PackingCost
from olm_data.storage.disk import io_errors, scratch
from olm_data.storage.store import Store

_LOOKED_AT = 1 << 22  # pieces

STARTS, LENGTHS, ENDS = "starts.npy", "lengths.npy", "ends.npy"
FILES: dict[str, np.dtype[Any]] = {
    STARTS: np.dtype("<u8"),
    LENGTHS: np.dtype("<u4"),
    ENDS: np.dtype("<u8"),
}


class PlanInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a lock says of a source's row plan.

    Attributes:
        rows, pieces: how many there are.
        tokens: inputs in the rows; the other positions are padding.
        cut: documents longer than a row, which lie in several.
        dropped: tokens in no row (remainders shorter than `min_tail`).
        most_pieces: pieces of the row that has most.
        sha256: of each file, by name.
    """

    rows: Size
    pieces: Size
    tokens: Size
    cut: Size
    dropped: Size
    most_pieces: Size
    sha256: dict[str, str]

    @property
    def folder(self) -> str:
        """Folder of the files, relative to the lock's: named by content, so locks can share it."""
        return f"row-plans/{digest(msgspec.to_builtins(self))[:16]}"

    @property
    def counts(self) -> dict[str, int]:
        """Values in each file, by name."""
        return {STARTS: self.pieces, LENGTHS: self.pieces, ENDS: self.rows}

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by name."""
        return {name: HEADER_BYTES + n * FILES[name].itemsize for name, n in self.counts.items()}


class RowPlan:
    """A stored plan, memory-mapped.

    Attributes:
        rows: how many rows there are.
        starts: uint64 [p], first token of each piece, counted over the dataset.
        lengths: uint32 [p], tokens of each piece.
        ends: uint64 [rows], pieces up to and with each row.
    """

    def __init__(
        self, starts: NDArray[np.uint64], lengths: NDArray[np.uint32], ends: NDArray[np.uint64]
    ) -> None:
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
        for low in range(0, len(self.starts), _LOOKED_AT):
            starts = self.starts[low : low + _LOOKED_AT]
            here = starts < np.uint64(stop)
            here &= starts + self.lengths[low : low + _LOOKED_AT] > np.uint64(start)
            found.append(np.flatnonzero(here) + low)
        pieces = np.concatenate(found) if found else np.zeros(0, np.int64)
        rows = np.searchsorted(self.ends, pieces.astype(np.uint64), side="right")
        return np.unique(rows).astype(np.int64)

    @classmethod
    def open(cls, store: Store, info: PlanInfo, *, verify: Verify = "lazy") -> RowPlan:
        """Open the plan in `store`, which must be what the lock says of it.

        A remote plan is copied into a temporary folder and mapped from there; the space is free
        again when the plan is let go.

        Args:
            verify: `off` leaves out the digests of local files.

        Raises:
            ValidationError: a file is missing, damaged, or of another size.
        """
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(scratch()) if store.remote else Path(store.root)
            arrays = []
            for name, count in info.counts.items():
                try:
                    dtype, size, wanted = FILES[name], store.size(name), info.sizes[name]
                    header = npy_header(dtype, count)
                    if size != wanted:
                        raise ValueError(
                            "it is missing" if size is None else f"{size:,} bytes, not {wanted:,}"
                        )
                    seen = store.download(name, folder / name) if store.remote else None
                    data = mapped_bytes(Store(folder) if store.remote else store, name)
                    if len(data) != wanted or bytes(data[: len(header)]) != header:
                        raise ValueError(f"it is not an array of {count:,} {dtype}")
                    array = data[len(header) :].view(dtype)
                    if seen is None and verify != "off":
                        seen = store.sha256(name)
                    if seen not in (None, info.sha256[name]):
                        raise ValueError("its digest is not the one in the lock")
                except ValidationError:
                    raise
                except (OSError, ValueError) as error:
                    raise _damaged(store.url(name), str(error)) from error
                arrays.append(array)
            return cls(*arrays)


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
            starts.write(part.starts.astype(FILES[STARTS]).tobytes())
            lengths.write(part.lengths.astype(FILES[LENGTHS]).tobytes())
            ends.write((np.cumsum(part.counts) + pieces).astype(FILES[ENDS]).tobytes())
            rows += len(part.counts)
            pieces += len(part.starts)
        for file, dtype, count in zip(files, FILES.values(), (pieces, pieces, rows), strict=True):
            file.seek(0)
            file.write(npy_header(dtype, count))
            file.flush()
            os.fsync(file.fileno())
    return rows, pieces


def _damaged(url: str, why: str) -> ValidationError:
    return ValidationError(
        "a row plan of the mixture is missing or damaged",
        where=url,
        why=why,
        fix="run olm-data mix again: it writes the same plan",
    )


WINDOW = 1 << 22
"""Documents packed at once: the memory of a plan does not grow with the dataset."""

_AT_ONCE = 1 << 20  # documents of a shard looked at together


def documents(
    dataset: Dataset, window: int, scan: ViewScan | None = None
) -> Iterator[tuple[Int64, Int64]]:
    """Yield (first tokens, lengths), int64 [d] each, of all documents, window by window.

    Every window but the last has `window` documents. With a scan, of those that its view keeps.
    """
    starts: list[Int64] = []
    lengths: list[Int64] = []
    held = 0
    for first, sizes in _some_documents(dataset, scan):
        while len(first):
            taken = min(window - held, len(first))
            starts.append(first[:taken])
            lengths.append(sizes[:taken])
            first, sizes, held = first[taken:], sizes[taken:], held + taken
            if held == window:
                yield np.concatenate(starts), np.concatenate(lengths)
                starts, lengths, held = [], [], 0
    if held:
        yield np.concatenate(starts), np.concatenate(lengths)


def _some_documents(dataset: Dataset, scan: ViewScan | None) -> Iterator[tuple[Int64, Int64]]:
    """Yield (first tokens, lengths) of the documents that a view keeps, `_AT_ONCE` at most each."""
    before = 0
    for number, info in enumerate(dataset.manifest.shards):
        if info.documents:
            shard = dataset.open_shard(number)  # not kept open: there may be many
            masks = _all(info.documents) if scan is None else scan.chosen(number, shard)
            for low, mask in masks:
                ends = shard.ends[low : low + len(mask)].astype(np.int64)
                sizes = np.diff(ends, prepend=int(shard.ends[low - 1]) if low else 0)
                if scan is not None:
                    scan.count(sizes[mask])
                yield (before + ends - sizes)[mask], sizes[mask]
        before = int(dataset.token_ends[number])


def _all(count: int) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    for low in range(0, count, _AT_ONCE):
        yield low, np.ones(min(_AT_ONCE, count - low), bool)


def write_plan(
    dataset: Dataset,
    packing: Packing,
    sequence_length: int,
    folder: Path,
    scan: ViewScan | None = None,
) -> PlanInfo:
    """Write the row plan of a dataset, or of a view of it, into an existing local folder.

    Raises:
        ResourceError: the disk is full or fails.
    """
    cost, most = PackingCost(), 0

    def watched() -> Iterator[PackedRows]:
        nonlocal most
        for part in packing.pack(dataset, documents(dataset, WINDOW, scan), sequence_length, cost):
            most = max(most, int(part.counts.max(initial=0)))
            yield part

    return info_of(folder, write(folder, watched()), cost, most)


def info_of(folder: Path, size: tuple[int, int], cost: PackingCost, most: int) -> PlanInfo:
    """Return what is recorded of a plan in a local folder.

    Args:
        size: its rows and pieces.
        cost: what packing them has cost.
        most: pieces of the row with most of them.
    """
    rows, pieces = size
    return PlanInfo(
        rows=rows,
        pieces=pieces,
        tokens=cost.tokens,
        cut=cost.cut_long,
        dropped=cost.dropped,
        most_pieces=most,
        sha256={name: sha256_file(folder / name) for name in FILES},
    )
