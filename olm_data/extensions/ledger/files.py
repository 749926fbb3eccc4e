"""The loss ledger of a run: the loss of every piece of a document as it was trained.

    LedgerWriter (one a rank) --Entries--> <run>/ledger/step00000101-rank0002.parquet
    keep_until(folder, step): what lies beyond the checkpoint that a run goes on from is removed
    read_ledger(folder) -> files by step and rank -> Arrow tables of COLUMNS

A file holds the pieces of one rank in neighbouring steps, and is there whole or not at all: it is
written under another name, flushed, and renamed. It is named by its first step, and cut under that
name, so a kill leaves no step in two files. A piece is what a row holds of one document; it is
counted in nats, over the labels that count in the loss. Its `source:document` is the address that
`olm-data show document LOCK` takes.

Each file says its version, rank, world and mixture under the key `olm.ledger` of its parquet
metadata.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.errors import ResourceError, ValidationError
from olm_data.parquet import BoundedParquet
from olm_data.regular_files import open_regular
from olm_data.storage.disk import fsync_path, io_errors, make_folder

LEDGER = "ledger"
"""Folder of the files in a run's folder."""

MAX_ROWS = 1 << 22
"""Pieces in a file."""
MAX_GROUPS = 8
"""Row groups in a file; one has at most 1 Mi rows as it is written."""
MAX_FILE = 256 << 20
"""Bytes of a file."""
MOST_REFUSED = 8
"""Files' worth of pieces that wait in memory for a disk that refuses them."""

_NAME = re.compile(r"step(\d{8,})-rank(\d{4,})\.parquet")
_KEY = b"olm.ledger"
_NAMED = pa.dictionary(pa.int32(), pa.string())

COLUMNS = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),  # from 1
        pa.field("row", pa.int64(), nullable=False),  # of the run
        pa.field("source", _NAMED, nullable=False),
        pa.field("shard", _NAMED, nullable=False),  # of the source's dataset
        pa.field("document", pa.int64(), nullable=False),  # number in the dataset
        pa.field("start", pa.int64(), nullable=False),  # tokens [start, stop) of the document
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),  # of the source, from 0
        pa.field("tokens", pa.int32(), nullable=False),  # labels that count
        pa.field("nats", pa.float64(), nullable=False),  # sum over those; NaN or infinite as it was
    ]
)


class LedgerInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says of itself.

    Attributes:
        rank, world_size: whose rows they are.
        lock: digest of the mixture.
    """

    rank: Size
    world_size: Size
    lock: str
    version: Literal[1] = 1


@dataclass(frozen=True)
class LedgerFile:
    """A file of the ledger.

    Attributes:
        path: where it lies.
        first: its first step, by its name.
        rank: by its name.
    """

    path: Path
    first: int
    rank: int

    def read(self, columns: Sequence[str] | None = None) -> tuple[LedgerInfo, pa.Table]:
        """Return what the file says of itself, and its pieces.

        Args:
            columns: those wanted, in the order of `COLUMNS`; None: all.

        Raises:
            ValidationError: it is not a file that a run writes.
        """
        try:
            with open_regular(self.path) as raw:
                if os.fstat(raw.fileno()).st_size > MAX_FILE:
                    raise ValueError(f"it is larger than {MAX_FILE:,} bytes")
                file = BoundedParquet(raw)
                info = decode(file.metadata.get(_KEY, b""), LedgerInfo)
                if not file.schema.equals(COLUMNS):
                    raise ValueError("its columns are not those of a ledger")
                if file.groups > MAX_GROUPS:
                    raise ValueError("it has more row groups than a file of a ledger")
                if sum(file.rows) > MAX_ROWS or min(file.rows, default=0) < 0:
                    raise ValueError("it has more rows than a file of a ledger")
                if info.rank != self.rank:
                    raise ValueError("its rank is not what its name says")
                names = COLUMNS.names if columns is None else list(columns)
                table = pa.concat_tables(
                    [COLUMNS.empty_table().select(names)]
                    + [file.group(number, names) for number in range(file.groups)]
                )
        except (MalformedJson, ValueError, OSError, pa.ArrowException) as error:
            raise _malformed(self.path, str(error)) from error
        return info, table


@dataclass(frozen=True, kw_only=True)
class Entries:
    """The pieces of some documents in one step; all arrays are [pieces].

    Attributes:
        step: its number, from 1.
        row, document, start, stop, epoch, tokens: integers, see `COLUMNS`.
        source, shard: names.
        nats: float64.
    """

    step: int
    row: np.ndarray[Any, Any]
    source: Sequence[str]
    shard: Sequence[str]
    document: np.ndarray[Any, Any]
    start: np.ndarray[Any, Any]
    stop: np.ndarray[Any, Any]
    epoch: np.ndarray[Any, Any]
    tokens: np.ndarray[Any, Any]
    nats: np.ndarray[Any, Any]

    def batch(self) -> pa.RecordBatch:
        """Return the pieces as an Arrow batch of `COLUMNS`."""
        values = {**vars(self), "step": np.full(len(self.row), self.step, np.int64)}
        return pa.record_batch(
            [_array(values[field.name], field.type) for field in COLUMNS], schema=COLUMNS
        )


class LedgerWriter:
    """Writes the pieces of one rank, steps ascending; what the disk refuses waits in memory.

    Args:
        folder: of the run.
        info: what each file says of itself.
        steps_per_file: steps after which a file is written.
        max_rows: pieces after which one is, if that comes first.

    Attributes:
        written: the files so far.
        lost: first and last step that were let go since `take_lost`; None: none were.
    """

    def __init__(
        self, folder: Path, info: LedgerInfo, *, steps_per_file: int, max_rows: int
    ) -> None:
        self._folder, self._info = folder / LEDGER, info
        self._steps, self._max_rows = steps_per_file, min(max_rows, MAX_ROWS)
        self._waiting: list[tuple[int, pa.RecordBatch]] = []
        self._rows = 0
        self.written: list[Path] = []
        self.lost: tuple[int, int] | None = None

    @property
    def waiting(self) -> tuple[int, int] | None:
        """First and last step that wait in memory."""
        return (self._waiting[0][0], self._waiting[-1][0]) if self._waiting else None

    def take_lost(self) -> tuple[int, int] | None:
        """Return what was lost, once."""
        lost, self.lost = self.lost, None
        return lost

    def add(self, entries: Entries) -> None:
        """Add the pieces of a step, and write a file if it is time.

        Raises:
            ResourceError: the disk refuses it; the pieces wait, the oldest are lost if they are
                too many.
        """
        batch = entries.batch()
        self._waiting.append((entries.step, batch))
        self._rows += batch.num_rows
        if len(self._waiting) < self._steps and self._rows < self._max_rows:
            return
        try:
            self.flush()
        except ResourceError:
            self._forget()
            raise

    def flush(self) -> None:
        """Write what waits; returns when it is on the disk.

        Raises:
            ResourceError: the disk refuses it.
        """
        while self._waiting:
            count, rows = 0, 0  # after a refusal more may wait than a file holds
            for _, batch in self._waiting[: self._steps]:
                if count and rows + batch.num_rows > self._max_rows:
                    break
                count, rows = count + 1, rows + batch.num_rows
            first = self._waiting[0][0]
            table = pa.Table.from_batches([batch for _, batch in self._waiting[:count]])
            make_folder(str(self._folder))
            path = self._folder / _name(first, self._info.rank)
            _write(path, table, self._info)
            self.written.append(path)
            del self._waiting[:count]
            self._rows -= rows

    def _forget(self) -> None:
        """Let the oldest steps go if too many wait."""
        while len(self._waiting) > 1 and (
            self._rows > MOST_REFUSED * self._max_rows
            or len(self._waiting) > MOST_REFUSED * self._steps
        ):
            step, batch = self._waiting.pop(0)
            self._rows -= batch.num_rows
            self.lost = (self.lost[0] if self.lost else step, step)


def ledger_files(folder: Path) -> list[LedgerFile]:
    """Return the files of a run's ledger, by first step and rank; none without a ledger."""
    try:
        names = os.listdir(folder / LEDGER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    files = [
        LedgerFile(folder / LEDGER / name, int(match[1]), int(match[2]))
        for name in names
        if (match := _NAME.fullmatch(name))
    ]
    return sorted(files, key=lambda file: (file.first, file.rank))


def read_ledger(
    folder: Path, columns: Sequence[str] | None = None, *, steps: range | None = None
) -> Iterator[tuple[LedgerInfo, pa.Table]]:
    """Yield the files of a run's ledger one by one.

    Args:
        columns: those wanted; None: all.
        steps: of which pieces are wanted; a file that cannot hold one of them is not read.

    Raises:
        ValidationError: one is not a file that a run writes.
    """
    files = ledger_files(folder)
    if steps is None:
        yield from (file.read(columns) for file in files)
        return
    following, wanted = dict[int, int](), list[LedgerFile]()
    for file in reversed(files):
        if file.first < steps.stop and following.get(file.rank, steps.stop) > steps.start:
            wanted.append(file)
        following[file.rank] = file.first
    for file in reversed(wanted):
        info, table = file.read(columns)
        yield info, table.filter(pc.is_in(table["step"], pa.array(steps, pa.int64())))


def is_ledger_name(name: str) -> bool:
    """Whether a file of the ledger may have this name."""
    return _NAME.fullmatch(name) is not None


def keep_until(folder: Path, step: int | None) -> list[Path]:
    """Remove the pieces of steps beyond `step`, and files that were being written.

    Ranks of one machine may all call it, before any of them writes.

    Args:
        step: of the checkpoint that the run goes on from; None: a new run, all go.

    Returns:
        The files that were cut.

    Raises:
        ValidationError: a file is not one that a run writes.
        ResourceError: the disk refuses it.
    """
    cut: list[Path] = []
    place = folder / LEDGER
    if not place.is_dir():
        return cut
    with io_errors(str(place), writing=True):
        for unfinished in place.glob("*.parquet.tmp*"):
            unfinished.unlink(missing_ok=True)
    by_rank: dict[int, list[LedgerFile]] = {}
    for file in ledger_files(folder):
        by_rank.setdefault(file.rank, []).append(file)
    for files in by_rank.values():
        kept = [file for file in files if step is not None and file.first <= step]
        with io_errors(str(place), writing=True):
            for file in files[len(kept) :]:
                file.path.unlink(missing_ok=True)
        if kept and step is not None:
            info, table = kept[-1].read()
            steps = table.column("step").to_numpy()
            if (steps > step).any():
                _write(kept[-1].path, table.filter(pa.array(steps <= step)), info)
                cut.append(kept[-1].path)
    return cut


def lacking(folder: Path, step: int) -> dict[int, tuple[int, int]]:
    """Return what a ledger that was cut at a step lacks before it: by rank, first and last step.

    That is what the disk had not taken when the run was killed. Earlier steps are not looked at.

    Raises:
        ValidationError: a file is not one that a run writes.
    """
    files = ledger_files(folder)
    if not files:
        return {}
    newest = {file.rank: file for file in files}
    info, _ = files[-1].read(["step"])
    found: dict[int, tuple[int, int]] = {}
    for rank in range(info.world_size):
        last = files[0].first - 1
        if rank in newest:
            last = max(newest[rank].read(["step"])[1]["step"].to_numpy(), default=last)
        if last < step:
            found[rank] = (int(last) + 1, step)
    return found


def _write(path: Path, table: pa.Table, info: LedgerInfo) -> None:
    """Put a file in its place as a whole."""
    unfinished = path.with_name(f"{path.name}.tmp{os.getpid()}")
    table = table.replace_schema_metadata({_KEY: msgspec.json.encode(info)})
    with io_errors(str(path), writing=True):
        try:
            with open(unfinished, "wb") as file:
                pq.write_table(table, file, compression="zstd", use_dictionary=["source", "shard"])
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        fsync_path(path.parent)


def _name(first: int, rank: int) -> str:
    return f"step{first:08d}-rank{rank:04d}.parquet"


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(np.asarray(values), kind)


def _malformed(path: Path, why: str) -> ValidationError:
    return ValidationError(
        "a file of the loss ledger is malformed",
        where=str(path),
        why=why[:200],
        fix="restore it from a copy, or remove it: the steps in it are then missing",
    )
