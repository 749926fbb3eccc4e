"""Rows of a mixture (or of one dataset) as arrays: the torch-free half of the loader.

    rows int64 [m] -- Schedule.locate --> source, row in source --> first token of each window
                                                |
    Windows: shards opened on first touch, document ends looked up once a shard for all its rows
                                                |
    .read(i, j) --> RowBatch (b = j - i rows)   slices of memory maps, joined -> fields.py

`Windows` holds the located rows of many micro-batches, so that the index cost is paid once for
thousands of rows and what is left for each batch is copying tokens. A stage with a shorter sequence
length sees each row of the schedule as several: the same inputs and labels in the same order, in
another shape.

Memory for the arrays of batches, recycled as soon as nobody looks at a batch any more.

    Pool.lease -> one block: the arrays of a batch -> ... -> last view dies -> Pool

Also: the shards of several datasets as one row of tokens: which holds a token, opened on demand.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olm_data.config.arguments import checked
from olm_data.dataset.dataset import Dataset, open_shards_budget
from olm_data.dataset.labels import trained
from olm_data.dataset.shard import Shard, Verify
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.packing.concat import row_span
from olm_data.packing.row_plan import RowPlan
from olm_data.rows.cache_plan import CacheOptions, open_cache
from olm_data.rows.fields import (
    IGNORED_LABEL,
    PADDING_ROW,
    Int64,
    RowBatch,
    fill_labels,
    hide_untrained,
    piece_offsets,
)
from olm_data.rows.remote_shards import CachedShard, RemoteShards
from olm_data.rows.shard_cache import ShardCache


class Shards:
    """All shards of several datasets in one row, so that one binary search finds a token's shard.

    Args:
        datasets: the datasets; their shards are kept open here, least recently used out first.
        plans: the row plan of each dataset, None where rows are windows of its stream.
        cache: where shards of remote datasets go; None: they are read by ranges.

    Attributes:
        datasets, plans: as given.
        planned: bool [datasets], whether there is a plan.
        labelled: for each dataset, whether some of its tokens are not trained.
        first_token: int64 [datasets], tokens of the datasets before.
        ends: int64 [shards of all datasets], cumulative tokens.
        dtype: the widest of the datasets' dtypes.
        at_hand: shards a `Windows` may hold besides.
        remote: what fetches remote shards, None without a cache.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        plans: Sequence[RowPlan | None],
        cache: ShardCache | None = None,
    ) -> None:
        self.datasets, self.plans = datasets, plans
        self.planned = np.array([plan is not None for plan in plans])
        self.labelled = [dataset.manifest.trained is not None for dataset in datasets]
        self.first_token = _before([dataset.tokens for dataset in datasets])
        self._first_shard = _before([len(dataset.token_ends) for dataset in datasets])
        parts = [
            dataset.token_ends + first
            for dataset, first in zip(datasets, self.first_token, strict=True)
        ]
        self.ends: Int64 = np.concatenate(parts)
        self.dtype = np.result_type(*{dataset.dtype for dataset in datasets})
        self._budget = open_shards_budget()
        self.at_hand = min(64, self._budget)
        self._kept: OrderedDict[int, Shard | CachedShard] = OrderedDict()
        self._in_cache = np.array([d.store.remote and cache is not None for d in datasets])
        self.remote = None if cache is None else RemoteShards(datasets, cache)

    def touched(self, source: Int64, row: Int64, start: Int64, length: int) -> tuple[Int64, Int64]:
        """Return which shards of the cache some rows need.

        Args:
            source, row: integers [m], the source of each row and its number there.
            start: int64 [m], its first token where the source has no row plan.
            length: S.

        Returns:
            int64 [k] which of the m rows, and int64 [k] a shard it needs.
        """
        parts = []
        for number in np.flatnonzero(self._in_cache).tolist():
            which, plan = np.flatnonzero(source == number), self.plans[number]
            if plan is None:
                first = start[which]
                last = np.minimum(first + length, self.datasets[number].tokens - 1)
            else:
                high = plan.ends[row[which]].astype(np.int64)
                low = np.where(row[which], plan.ends[row[which] - 1].astype(np.int64), 0)
                owner, piece = _expand(low, high - low)
                which, first = which[owner], plan.starts[piece].astype(np.int64)
                last = first + plan.lengths[piece] - 1
            shards = np.searchsorted(self.ends, self.first_token[number] + first, side="right")
            stop = np.searchsorted(self.ends, self.first_token[number] + last, side="right") + 1
            owner, shard = _expand(shards, stop - shards)
            parts.append((which[owner], shard))
        if not parts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def open(self, number: int) -> Shard | CachedShard:
        """Return a shard by its number over all datasets."""
        shard = self._kept.get(number)
        if shard is not None:
            self._kept.move_to_end(number)
            return shard
        source = int(np.searchsorted(self._first_shard, number, side="right")) - 1
        if self.remote is not None and self._in_cache[source]:
            shard = self.remote.open(number)
        else:
            shard = self.datasets[source].open_shard(number - int(self._first_shard[source]))
        self._kept[number] = shard
        if len(self._kept) > self._budget:
            self._kept.popitem(last=False)
        return shard

    def trained(self, source: int, start: int, size: int) -> NDArray[np.bool_]:
        """Return bool [size], which tokens of a dataset from `start` on are trained."""
        mask, done = np.ones(size, bool), 0
        for shard, first, last in self.parts(source, start, size):
            if shard.labels is not None:
                mask[done : done + last - first] = trained(shard.labels, first, last)
            done += last - first
        return mask

    def parts(
        self, source: int, start: int, size: int
    ) -> Iterator[tuple[Shard | CachedShard, int, int]]:
        """Yield the shards with some tokens of a dataset, and which of theirs: [first, last)."""
        position = int(self.first_token[source]) + start
        number = int(np.searchsorted(self.ends, position, side="right"))
        while size:
            shard, end = self.open(number), int(self.ends[number])
            tokens = int(shard.ends[-1])
            first = position - (end - tokens)
            last = min(tokens, first + size)
            yield shard, first, last
            position, size, number = position + last - first, size - (last - first), number + 1


def _before(counts: Sequence[int]) -> Int64:
    """Return the exclusive running sums of `counts`."""
    return np.cumsum([0, *counts[:-1]], dtype=np.int64)


def _expand(low: Int64, count: Int64) -> tuple[Int64, Int64]:
    """Return for the ranges [low, low + count) which range each number is of, and the numbers."""
    owner = np.repeat(np.arange(len(low)), count)
    return owner, np.arange(len(owner)) - (np.cumsum(count) - count - low)[owner]


class Pool:
    """Memory of batches nobody references any more, by size.

    A fresh batch of a few megabytes costs several times its copying in page faults, as the
    allocator returns such blocks to the system. Here a block comes back when the last array (or
    tensor) on it is gone: the arrays hang on one ndarray whose death a weak reference reports.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._leases: dict[int, weakref.ref[NDArray[np.uint8]]] = {}  # by the id of the block

    def lease(self, size: int) -> NDArray[np.uint8]:
        """Return uint8 [size] on a page border, to be reused once all views of it are gone."""
        blocks = self._free.setdefault(size, [])
        block = blocks.pop() if blocks else _pages(size)
        array = np.frombuffer(block, dtype=np.uint8, count=size)
        self._leases[id(block)] = weakref.ref(array, lambda _: blocks.append(block))
        return array


HUGE = 2 << 20


def _pages(size: int) -> mmap.mmap:
    """Return private memory that starts on a page border: NumPy's own often splits cache lines."""
    whole = -(-size // HUGE) * HUGE  # the kernel gives huge pages for whole ones alone
    block = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


_ACROSS = -1
"""Shard of a row that does not lie inside one shard."""


class RowReader:
    """Reads rows of a mixture lock, in any order and number.

    Args:
        lock: the lock or the path of its file.
        verify: `lazy` checks each 64 KiB block of tokens on first read, `full` whole shards when
            they are opened, `off` nothing but sizes and headers.
        cache: where whole shards of remote datasets go before they are read; None: their rows are
            read by ranges, a request each.

    Raises:
        ValidationError: the lock or a dataset is not what its digest says.
        UsageError, ResourceError: the cache is too small for the mixture.
    """

    @checked()
    def __init__(
        self,
        lock: Lock | str | os.PathLike[str],
        verify: Verify = "lazy",
        cache: CacheOptions | None = None,
    ) -> None:
        self.lock = lock if isinstance(lock, Lock) else Lock.read(lock)
        self.schedule = self.lock.schedule()
        self.datasets = self.lock.open_datasets(verify=verify)
        opened = None if cache is None else open_cache(self.lock, self.datasets, cache)
        self._shards = Shards(self.datasets, self.lock.open_plans(verify=verify), opened)
        self.remote = self._shards.remote
        self.sequence_length: int = self.lock.sequence_length
        self.total_rows: int = self.schedule.total_rows
        self.max_documents_per_row = max(s.max_documents_per_row for s in self.lock.sources)
        self._pool = Pool()

    def __repr__(self) -> str:
        length = self.sequence_length
        return f"<RowReader of {self.lock!r}: input_ids and labels [b, {length:,}] int64>"

    def prepare(self, rows: Int64) -> Windows:
        """Locate rows, to be read in pieces. Opens no shard.

        Args:
            rows: int64 [m], each in 0 .. total_rows - 1.

        Raises:
            UsageError: a row is outside the schedule.
        """
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.total_rows):
            bad = rows[(rows < 0) | (rows >= self.total_rows)][0]
            raise UsageError(
                f"row {bad:,} does not exist: the schedule has rows 0 to {self.total_rows - 1:,}",
                fix="ask for a row of the schedule, or make a longer mixture with olm-data mix",
            )
        origin = self.schedule.locate(rows)
        start = row_span(origin.row, self.sequence_length)[0]
        return Windows(
            self._shards,
            rows,
            origin.source,
            np.where(self._shards.planned[origin.source], origin.row, start),
            self.sequence_length,
            self.max_documents_per_row,
            self._pool,
        )

    def prefetch(self, steps: Int64, rows: Int64) -> None:
        """Say which rows will be read next, so that their shards are fetched ahead.

        Args:
            steps: int64 [m], the step of each row; see `RemoteShards.reached`.
            rows: int64 [m], of all ranks that share the cache.
        """
        if self.remote is None:
            return
        origin = self.schedule.locate(rows)
        start = row_span(origin.row, self.sequence_length)[0]
        which, shards = self._shards.touched(origin.source, origin.row, start, self.sequence_length)
        self.remote.prefetch(steps[which], shards)

    def read(self, rows: Int64, parts: int = 1) -> RowBatch:
        """Return rows int64 [b] as one micro-batch of b * parts rows, see `Windows.read`.

        Raises:
            UsageError: a row is outside the schedule.
            ValidationError: a shard is damaged.
        """
        return self.prepare(rows).read(0, len(rows), parts)


class DatasetRows:
    """The rows of one dataset in order, for evaluation: every token but the first is a label once.

    Row r is the window from token r * S; the last one is padded with id 0 and labels -100. Padding
    counts as part of the last document, so it is never a piece of its own.

    Args:
        dataset: an open dataset.
        sequence_length: S.
        eos: id that ends each document, where the next one is to begin with it: then every token
            is a label, the first one of a document after this id, and row r has those from token
            r * S on.
    """

    def __init__(self, dataset: Dataset, sequence_length: int, eos: int | None = None) -> None:
        self.dataset, self.sequence_length, self._eos = dataset, sequence_length, eos
        self._shards = Shards([dataset], [None])
        self.total_rows = -(-max(0, dataset.tokens - (eos is None)) // sequence_length)
        self.max_documents_per_row = dataset.manifest.documents_bound(sequence_length)
        self._pool = Pool()

    def read(self, rows: Int64) -> RowBatch:
        """Return rows int64 [b] as one micro-batch; a row >= total_rows is all padding."""
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        beyond = rows >= self.total_rows
        windows = Windows(
            self._shards,
            np.where(beyond, PADDING_ROW, rows),
            np.zeros(len(rows), dtype=np.int64),
            np.where(beyond, self.dataset.tokens, row_span(rows, self.sequence_length)[0]),
            self.sequence_length,
            self.max_documents_per_row,
            self._pool,
        )
        batch = windows.read(0, len(rows))
        if self._eos is not None:
            self._label_all(batch, rows, self._eos)
        return batch

    def _label_all(self, batch: RowBatch, rows: Int64, eos: int) -> None:
        """Make the tokens of windows the labels, and the one before each its input."""
        length, tokens = self.sequence_length, batch.tokens  # a copy: the inputs change below
        places = rows[:, None] * length + np.arange(length)  # [b, S]
        known = places < self.dataset.tokens
        batch.labels[...] = tokens[:, :-1]
        batch.labels[~known] = IGNORED_LABEL
        if self._shards.labelled[0]:
            for k, (row, size) in enumerate(zip(rows.tolist(), known.sum(axis=1), strict=True)):
                trained = self._shards.trained(0, row * length, int(size))
                batch.labels[k, :size][~trained] = IGNORED_LABEL
        batch.input_ids[:, 1:], batch.following[...] = tokens[:, : length - 1], tokens[:, -2]
        for k, first in enumerate(places[:, 0].tolist()):
            if k and rows[k - 1] + 1 == rows[k]:
                batch.input_ids[k, 0] = tokens[k - 1, length - 1]
            elif known[k, 0]:
                batch.input_ids[k, 0] = self.dataset.read(first - 1, first)[0] if first else eos


class Windows:
    """m located rows of S + 1 tokens, read in pieces [i, j).

    A row that is one window inside one shard is a slice of its memory map. One that crosses shards,
    runs past the end of its dataset (padding), or has a row plan is put together piece by piece.

    Args:
        shards: the shards of all datasets.
        rows: int64 [m] ids that go into the batches.
        source: integers [m], the dataset of each row; kept as `source`.
        start: int64 [m], first token of each window, counted over the dataset; of a source with a
            row plan, the number of the row.
        length: S.
        max_documents_per_row: most pieces in a row.
        pool: where batches get their memory.
    """

    def __init__(
        self,
        shards: Shards,
        rows: Int64,
        source: NDArray[np.integer[Any]],
        start: Int64,
        length: int,
        max_documents_per_row: int,
        pool: Pool,
    ) -> None:
        self._shards, self._rows, self._pool = shards, rows, pool
        self._length, self._max_documents_per_row = length, max_documents_per_row
        position = shards.first_token[source] + start
        shard = np.searchsorted(shards.ends, position, side="right")
        inside = position + length < np.append(shards.ends, 0)[shard]
        inside &= ~shards.planned[source]
        shard[~inside] = _ACROSS
        local = np.where(inside, position - np.append(0, shards.ends)[shard], start)
        # windows by shard, so that all windows of one are looked up together, and in it about by
        # position, which makes look-ups twice as fast; NumPy sorts 16 bits by radix
        high = position >> max(0, int(position.max(initial=0)).bit_length() - 16)
        keys = high.astype(np.uint16), shard.astype(np.min_scalar_type(len(shards.ends)))
        by_position = np.lexsort(keys)
        self._by_shard = by_position[inside[by_position]]
        self._shard_column = shard[self._by_shard]
        self._local_column = local[self._by_shard]
        self.source, self._start, self._shard, self._local = source, start, shard, local
        self._checked = np.zeros(len(rows), dtype=bool)
        self._near: dict[int, memoryview] = {}  # shard -> its tokens, where they need no widening
        self._looked_up: set[int] = set()
        self._looked_up_across: set[int] = set()
        # cuts of the windows looked up so far, ascending, as positions in the flattened m windows
        self._cuts: Int64 = np.zeros(0, dtype=np.int64)
        self._new_cuts: list[Int64] = []

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, i: int, j: int, parts: int = 1) -> RowBatch:
        """Return windows i .. j-1 with all fields, each cut into `parts` rows of equal length.

        The parts of a window hold its inputs and labels, each once: a label at the end of a part is
        the first input of the next one, unless a document ends there. A document that goes on in
        the next part is a new piece there, with positions from 0, as at the start of a window.

        Args:
            i, j: which windows.
            parts: a divisor of the window's length.

        Raises:
            ValidationError: a shard is damaged, or holds more documents than its manifest promises.
        """
        input_ids, labels, cuts, following = self._fill(i, j)
        length = self._length // parts
        # [b, S] -> [b * parts, S / parts], without a copy
        shape = ((j - i) * parts, length)
        # each of the parts - 1 cuts may go through a document and so add one piece
        capacity = (j - i) * (self._max_documents_per_row + parts - 1)
        return RowBatch(
            rows=self._rows[i:j].repeat(parts),
            input_ids=input_ids.reshape(shape),
            labels=labels.reshape(shape),
            cu_seqlens=piece_offsets(cuts, capacity, *shape),
            max_seqlen=length,
            following=following,
        )

    def read_tokens(self, i: int, j: int) -> tuple[Int64, Int64]:
        """Return only (input_ids, labels) of windows i .. j-1, as `read` would."""
        return self._fill(i, j)[:2]

    def _fill(self, i: int, j: int) -> tuple[Int64, Int64, Int64, NDArray[Any]]:
        """Return inputs and labels of windows i .. j-1, their cuts, and what follows them."""
        block = self._pool.lease((j - i) * self._length * 16)
        input_ids, labels = block.view(np.int64).reshape(2, j - i, self._length)
        width, dtype, near = self._length + 1, self._shards.dtype, self._near
        rows: list[memoryview | bytes] = []
        padded: list[tuple[int, int]] = []  # (row in the batch, tokens it really has)
        columns = (self._shard, self._local, self._checked)
        windows = zip(*(column[i:j].tolist() for column in columns), strict=True)
        for row, (shard, first, verified) in enumerate(windows):
            if verified and shard in near:
                rows.append(near[shard][first : first + width])
            elif shard != _ACROSS:
                tokens = self._open(shard).read(first, first + width)
                rows.append(tokens.astype(dtype, copy=False).tobytes())  # the shard may close
            else:
                out = np.zeros(width, dtype)
                valid = self._read_across(i + row, out)
                rows.append(out.data)
                if valid < width:
                    padded.append((row, valid))
        # one join copies faster than a loop over rows, and what it makes stays in a core's cache
        gathered = np.frombuffer(b"".join(rows), dtype).reshape(j - i, width)
        cuts = self._cuts_of(i, j)
        fill_labels(gathered, cuts, input_ids, labels)
        for row, valid in padded:
            labels[row, max(0, valid - 1) :] = IGNORED_LABEL
        if any(self._shards.labelled):
            for row, source in enumerate(self.source[i:j].tolist()):
                if self._shards.labelled[source]:
                    hide_untrained(self._trained(i + row), labels[row])
        return input_ids, labels, cuts, gathered[:, -1].copy()

    def _open(self, number: int) -> Shard | CachedShard:
        """Return a shard whose windows are looked up, and keep it at hand."""
        shard = self._shards.open(number)
        if number not in self._looked_up:
            self._looked_up.add(number)
            self._look_up(number, shard)
        room = len(self._near) < self._shards.at_hand
        if room and isinstance(shard, Shard) and shard.mapped and shard.dtype == self._shards.dtype:
            self._near[number] = shard.tokens.data
        return shard

    def _look_up(self, number: int, shard: Shard | CachedShard) -> None:
        """Find, for all windows in one shard, their cuts and whether their blocks are checked."""
        low, high = np.searchsorted(self._shard_column, (number, number + 1))
        members, start = self._by_shard[low:high], self._local_column[low:high]
        self._checked[members] = shard.is_checked(start, self._length + 1)
        # NumPy would turn all uint64 ends into floats to compare them with int64
        ends = shard.ends.view(np.int64)
        first = np.searchsorted(ends, start, side="right")
        count = np.searchsorted(ends, start + self._length, side="right") - first
        stops = np.cumsum(count)
        found = ends.take(np.arange(stops[-1]) + np.repeat(first - (stops - count), count))
        self._new_cuts.append(found + np.repeat(members * self._length - start, count))

    def _read_across(self, k: int, out: NDArray[Any]) -> int:
        """Put row k together in `out`, [S+1] zeros; return how many tokens it has."""
        source, local = int(self.source[k]), int(self._local[k])
        dataset, plan = self._shards.datasets[source], self._shards.plans[source]
        done, cuts = 0, []
        if plan is None:
            done = min(self._length + 1, dataset.tokens - local)
            cuts.append(self._copy(source, local, out[:done]))
        else:
            for first, size in plan.pieces(local):
                self._copy(source, first, out[done : done + size])
                done += size
                cuts.append(np.array([done], np.int64))
        if k not in self._looked_up_across:
            positions = np.concatenate(cuts)  # the last one of the row cuts nothing
            self._new_cuts.append(positions[positions < done] + k * self._length)
            self._looked_up_across.add(k)
        return done

    def _trained(self, k: int) -> NDArray[np.bool_]:
        """Return bool [n], which tokens of row k are trained; n is at most S + 1."""
        source, start = int(self.source[k]), int(self._start[k])
        plan, left = self._shards.plans[source], self._shards.datasets[source].tokens - start
        pieces = [(start, min(self._length + 1, left))] if plan is None else plan.pieces(start)
        return np.concatenate([self._shards.trained(source, *piece) for piece in pieces])

    def _copy(self, source: int, start: int, out: NDArray[Any]) -> Int64:
        """Copy tokens of a dataset from `start` on to `out`; return where in it documents end."""
        done, ends = 0, []
        for shard, first, last in self._shards.parts(source, start, len(out)):
            out[done : done + last - first] = shard.read(first, last)
            # ends e of this shard with first < e <= last
            low, high = np.searchsorted(shard.ends, np.array([first + 1, last + 1], np.uint64))
            ends.append(shard.ends[low:high].astype(np.int64) + (done - first))
            done += last - first
        return np.concatenate(ends) if ends else np.zeros(0, np.int64)

    def _cuts_of(self, i: int, j: int) -> Int64:
        """Return the cuts of windows i .. j-1, all looked up before, as positions among them."""
        if self._new_cuts:
            cuts = np.concatenate([self._cuts, *self._new_cuts])
            # those of a window are in order; windows fit 16 bits, which are sorted by radix
            window = ((cuts - 1) // self._length).astype(np.min_scalar_type(len(self)))
            self._cuts = cuts[np.argsort(window, kind="stable")]
            self._new_cuts.clear()
        # a cut at the very start of window j is the end of window j - 1
        first, stop = i * self._length, j * self._length
        low, high = self._cuts.searchsorted((first, stop), side="right")
        return self._cuts[low:high] - first
