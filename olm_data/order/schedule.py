"""Order `prp1`: which row of which source stands at row i of the run, as a pure function.

    row i -> stage -> block, slot -> source and rank                        (slot table, slots.py)
    ordinal = rows of the source in earlier stages + block * count + rank
    epoch, k = divmod(ordinal, rows of the source)
    row in source = order.rows_at(k; seed, name, epoch)                      (orders.py)

Everything is vectorised and exact in 64-bit integers, and nothing has the size of a dataset: the
largest table is one block of slots a stage, built when the stage is first touched. A change here is
a new order version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from olm_data.order.base import Order, SourceEpochs
from olm_data.order.prp import MAX_ROWS
from olm_data.order.shuffled import Shuffled
from olm_data.order.slots import SlotTable, slot_table

VERSION = "prp1"
SAMPLE = 1 << 16
"""Rows of a long run whose origin is digested."""


@dataclass(frozen=True)
class ScheduleStage:
    """Neighbouring rows of the run with constant shares.

    Attributes:
        rows: rows of this stage.
        counts: rows of each source in one block of the stage.
        drawn: rows of each source in the whole stage, or None to compute them. Given, they spare
            building the slot tables of stages that are never touched; they are checked when one is.
    """

    rows: int
    counts: tuple[int, ...]
    drawn: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class RowOrigin:
    """Where each of m rows of the run comes from.

    Attributes:
        stage: int32[m].
        source: int32[m], index into the schedule's sources.
        epoch: int64[m], how often the source was gone through before, from 0.
        row: int64[m], row inside the source.
    """

    stage: np.ndarray
    source: np.ndarray
    epoch: np.ndarray
    row: np.ndarray


class Schedule:
    """The order of all rows of a run.

    Args:
        seed: any integer; with a source's name and the epoch it keys the permutation.
        sources: (name, rows) of each source; a source that is drawn has at least one row.
        stages: in the order of the run.
        order: of the rows of each source in an epoch.

    Raises:
        ValueError: counts or an order that do not fit the sources, a drawn source without rows, or
            a total beyond 2^62 rows.
    """

    def __init__(
        self,
        seed: int,
        sources: Sequence[tuple[str, int]],
        stages: Sequence[ScheduleStage],
        order: Order = Shuffled(),  # noqa: B008 - frozen
    ) -> None:
        if not order.fits([rows for _, rows in sources]):
            raise ValueError(f"order {order.name} does not fit these sources")
        self.seed, self.order = seed, order
        self.names = tuple(name for name, _ in sources)
        self.source_rows = np.array([rows for _, rows in sources], dtype=np.int64)
        # rows of each source in one epoch
        self.epoch_rows = order.epoch_rows(self.source_rows)
        self.stages = tuple(stages)
        self._tables: dict[tuple[int, ...], SlotTable] = {}
        for stage in self.stages:
            if len(stage.counts) != len(self.names) or stage.rows < 0:
                raise ValueError("a stage has one count for each source and no negative rows")
            if any(c and not n for c, n in zip(stage.counts, self.source_rows, strict=True)):
                raise ValueError("a source that is drawn has at least one row")
        if sum(stage.rows for stage in self.stages) > MAX_ROWS:
            raise ValueError("a schedule has at most 2^62 rows")
        self.stage_ends = np.cumsum([stage.rows for stage in self.stages], dtype=np.int64)
        self._starts = self.stage_ends - np.array([s.rows for s in self.stages], dtype=np.int64)
        self._counts = np.array(
            [s.counts for s in self.stages], dtype=np.int64
        )  # [stages, sources]
        drawn = [s.drawn or rows_by_source(s, self.table(i)) for i, s in enumerate(self.stages)]
        self._drawn_ends = np.cumsum(np.array(drawn, dtype=np.int64), axis=0)  # [stages, sources]
        self._base = self._drawn_ends - np.array(drawn, dtype=np.int64)

    @property
    def total_rows(self) -> int:
        """Rows of the run."""
        return int(self.stage_ends[-1]) if self.stages else 0

    def table(self, stage: int) -> SlotTable:
        """Return the slot table of a stage, building it on first use; equal counts share one."""
        wanted = self.stages[stage]
        table = self._tables.get(wanted.counts)
        if table is None:
            table = self._tables[wanted.counts] = slot_table(wanted.counts)
        if wanted.drawn is not None and rows_by_source(wanted, table) != wanted.drawn:
            raise ValueError(f"stage {stage}: the stated rows by source are not those of its table")
        return table

    def drawn_before(self, row: int) -> np.ndarray:
        """Return int64[sources]: rows of each source among the rows of the run before `row`.

        Raises:
            IndexError: not in 0 .. total_rows.
        """
        if not 0 <= row <= self.total_rows:
            raise IndexError(f"row {row} of a run of {self.total_rows} rows")
        stage = min(int(np.searchsorted(self.stage_ends, row, side="right")), len(self.stages) - 1)
        table = self.table(stage)
        blocks, slot = divmod(row - int(self._starts[stage]), len(table.source))
        drawn: np.ndarray = self._base[stage] + blocks * self._counts[stage] + table.before(slot)
        return drawn

    def rows_within(self, limits: np.ndarray) -> int:
        """Return how many first rows of the run draw no source beyond `limits` int64[sources]."""
        low, high = 0, self.total_rows
        while low < high:
            middle = (low + high + 1) // 2
            if (self.drawn_before(middle) <= limits).all():
                low = middle
            else:
                high = middle - 1
        return low

    def ordinal(self, rows: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (stage int32[m], source int32[m], ordinal int64[m]) of global rows int64[m].

        The ordinal counts how many rows of the same source the run has drawn before.

        Raises:
            IndexError: a row outside the run.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.total_rows:
            raise IndexError(f"a row is outside this run of {self.total_rows} rows")
        stages = np.searchsorted(self.stage_ends, rows, side="right").astype(np.int32)
        sources = np.empty(rows.shape, dtype=np.int32)
        ordinals = np.empty(rows.shape, dtype=np.int64)
        for stage in np.flatnonzero(np.bincount(stages.ravel())).tolist():
            here = stages == stage
            table = self.table(stage)
            block, slot = np.divmod(rows[here] - self._starts[stage], len(table.source))
            source = table.source.take(slot)
            sources[here] = source
            before = self._base[stage].take(source) + block * self._counts[stage].take(source)
            ordinals[here] = before + table.rank.take(slot)
        return stages, sources, ordinals

    def locate(self, rows: Any) -> RowOrigin:
        """Return where each of the global rows int64[m] comes from.

        Raises:
            IndexError: a row outside the run.
        """
        stage, source, ordinal = self.ordinal(rows)
        return RowOrigin(stage, source, *self._drawn(source, ordinal))

    def drawn_rows(self, source: int, ordinals: np.ndarray) -> np.ndarray:
        """Return the rows int64[m] of a source that the run draws at `ordinals` int64[m] of it."""
        return self._drawn(np.full(ordinals.shape, source), ordinals)[1]

    def rows_of(self, source: int, row: int) -> np.ndarray:
        """Return the global rows, ascending int64, at which row `row` of `source` is seen.

        The inverse of `locate`: one value for each epoch that reaches the row.

        Raises:
            IndexError: no such source or row.
        """
        return self.sightings(source, np.array([row], np.int64))[0]

    def sightings(self, source: int, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return where rows int64[m] of `source` are seen, in all epochs.

        Returns:
            int64[n] global rows, ascending, and int64[n] the row of the source each of them is.

        Raises:
            IndexError: no such source or row.
        """
        size, wanted = int(self.source_rows[source]), np.asarray(rows, dtype=np.int64)
        outside = wanted[(wanted < 0) | (wanted >= size)]
        if outside.size:
            raise IndexError(f"row {outside[0]} of a source of {size} rows")
        drawn = int(self._drawn_ends[-1, source]) if self.stages else 0
        turn = int(self.epoch_rows[source])
        epochs = np.repeat(np.arange(-(-drawn // turn), dtype=np.int64), wanted.size)
        wanted = np.tile(wanted, epochs.size // max(wanted.size, 1))
        if not epochs.size:
            return epochs, wanted
        which = self._epochs(np.full(epochs.shape, source), epochs)
        positions = self.order.positions_of(wanted, which)
        ordinals = np.where(positions < turn, epochs * turn + positions, drawn)
        wanted, ordinals = wanted[ordinals < drawn], ordinals[ordinals < drawn]
        stages = np.searchsorted(self._drawn_ends[:, source], ordinals, side="right")
        found = np.empty(ordinals.shape, dtype=np.int64)
        for stage in np.flatnonzero(np.bincount(stages.ravel())).tolist():
            here = stages == stage
            table = self.table(stage)
            block, rank = np.divmod(
                ordinals[here] - self._base[stage, source], self._counts[stage, source]
            )
            slot = table.slots[table.first[source] + rank]
            found[here] = self._starts[stage] + block * len(table.source) + slot
        order = np.argsort(found)
        return found[order], wanted[order]

    def _drawn(self, source: np.ndarray, ordinal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epoch and row, int64[m] each, of the `ordinal`-th draws of sources."""
        epoch, position = np.divmod(ordinal, self.epoch_rows.take(source))
        return epoch, self.order.rows_at(position, self._epochs(source, epoch))

    def _epochs(self, source: np.ndarray, epoch: np.ndarray) -> SourceEpochs:
        return SourceEpochs(self.seed, self.names, source, self.source_rows.take(source), epoch)


def rows_by_source(stage: ScheduleStage, table: SlotTable) -> tuple[int, ...]:
    """Return how many rows of each source a stage draws: whole blocks and the part of one."""
    blocks, rest = divmod(stage.rows, len(table.source))
    before = table.before(rest).tolist()
    return tuple(blocks * count + part for count, part in zip(stage.counts, before, strict=True))


def sample_rows(rows: int) -> np.ndarray:
    """Return int64[m]: all of `rows` rows, or, of more than 2^16, a quarter of 2^16 at each end
    and the rest evenly between."""
    if rows <= SAMPLE:
        return np.arange(rows, dtype=np.int64)
    end, middle = SAMPLE // 4, SAMPLE // 2
    step = (rows - 2 * end) // middle
    between = end + step * np.arange(middle, dtype=np.int64)
    return np.concatenate([np.arange(end), between, np.arange(rows - end, rows)])


def schedule_sha256(schedule: Schedule, rows: np.ndarray) -> str:
    """Return the sha256 of where `rows` (int64[m]) come from.

    Digested: the names of the sources that are drawn, each after its length in bytes, then for all
    rows, as little-endian int64, the index among these names, the epoch, and the row of the source.
    """
    found = schedule.locate(rows)
    drawn, index = np.unique(found.source, return_inverse=True)
    digest = hashlib.sha256()
    for source in drawn.tolist():
        name = schedule.names[source].encode()
        digest.update(len(name).to_bytes(8, "little") + name)
    for column in (index, found.epoch, found.row):
        digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    return digest.hexdigest()
