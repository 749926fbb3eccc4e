"""`mix --like LOCK`: the documents of a lock, in its order, as rows of other tokens or lengths.

    rows that LOCK draws of a source --_Draws--> its documents, each where its first token is read
      --packing--> rows, one after another --_placed--> row plan, each where `global` draws it

So the new lock is one like any other, and its order is in its row plans: each row is drawn once,
however often its documents are. docs/reference/mixture.md says what is promised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise, zip_longest
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.docs import DocumentRows
from olm_data.dataset.view import ViewInfo
from olm_data.errors import InputError, printable
from olm_data.mixture.compile_stages import ratio
from olm_data.mixture.lock import Lock, split
from olm_data.mixture.lock_format import Likeness, LockStage, part_label
from olm_data.mixture.manifest import mixture_like
from olm_data.mixture.mix import MixPlan, MixResult, PackedSource, lock_path, open_sources
from olm_data.order.base import Int64, SourceEpochs
from olm_data.order.shuffled import Shuffled
from olm_data.order.slots import exact_parts
from olm_data.packing.base import PackedRows, PackingCost, ranges
from olm_data.packing.concat import StreamRows
from olm_data.packing.row_plan import FILES, WINDOW, RowPlan, documents, info_of
from olm_data.packing.row_plan import write as write_rows

_ROWS = 1 << 14
"""Rows looked at together."""

_COLUMNS = ("id", "position", "content_hash")
"""What is the same of a document under all tokenizers."""


def mix_like(
    path: str,
    manifest: str,
    output: str | None = None,
    *,
    dry_run: bool = False,
    overwrite: bool = False,
) -> MixResult:
    """Write a lock that draws the documents of the lock at `path`, in its order.

    Args:
        path: a lock.
        manifest: `sources` with their `data`; `sequence_length`, `packing`, where not those of the
            lock.
        output: the new lock (default: NAME.lock.json beside the manifest).

    Raises:
        UsageError: the manifest says what the lock decides, or names other sources.
        InputError: a dataset has other documents, or those of a source fill no row.
        ValidationError: the lock or its data are damaged.
        ConflictError: another lock is at `output` and `overwrite` is not set.
    """
    old, place = Lock.read(path), lock_path(manifest, output)
    if not old.complete:
        raise InputError(
            "text of this lock is still to arrive",
            where=path,
            fix="wait until it is there, and bring the lock up to date: olm-data mix MANIFEST",
        )
    mixture = mixture_like(manifest, old)
    plan = _LikePlan(mixture, open_sources(mixture), split(place)[0], old=old)
    return plan.write(place, lambda made: made.compile(), dry_run=dry_run, overwrite=overwrite)


@dataclass(frozen=True)
class _Packed(PackedSource):
    """A source packed, how it is like that of the other lock, and its rows in each stage there."""

    like: Likeness = field(kw_only=True)
    stage_rows: Int64 = field(kw_only=True)


@dataclass(frozen=True)
class _LikePlan(MixPlan):
    """What a lock like `old` is made by."""

    old: Lock = field(kw_only=True)

    @property
    def planned(self) -> list[str]:
        """All sources: their order is in their row plans."""
        return [source.name for source in self.mixture.sources]

    def _pack(self, name: str, folder: Path) -> _Packed:
        folder.mkdir()
        index, ours = [s.name for s in self.old.sources].index(name), self.datasets[name]
        length, cost, ends = self.mixture.sequence_length, PackingCost(), []
        theirs = self.old.open_dataset(index)
        _refuse_others(theirs, ours, self.mixture.where("sources", name, "data"))
        for place, dataset in (("there", theirs), ("here", ours)):
            ends.append(np.memmap(folder / place, np.int64, "w+", shape=(dataset.documents,)))
            done = 0
            for starts, lengths in documents(dataset, WINDOW):
                ends[-1][done : done + len(starts)] = starts + lengths
                done += len(starts)
        draws = _Draws(self.old, index, length + 1, folder, *ends)
        (folder / "in-order").mkdir()
        write_rows(folder / "in-order", self.mixture.packing.pack(ours, draws, length, cost))
        paths = (folder / "in-order" / file for file in FILES)
        arrays = (np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
        in_order = RowPlan(*arrays)
        size = write_rows(folder, _placed(in_order, self.mixture.seed, name))
        stage_rows, most = _measured(in_order, draws.stage_tokens, length)
        plan = info_of(folder, size, cost, most)
        like = Likeness(
            lock=self.old.digest,
            documents=draws.begun,
            tokens=draws.tokens,
            tokens_there=draws.tokens_there,
            rows_there=self.old.rows_drawn(index),
            whole_here=draws.begun - draws.whole,
            not_here=draws.drawn - draws.begun,
            cut_here=int((np.cumsum(draws.last[::-1]) - draws.last[::-1] < cost.dropped).sum()),
        )
        return _Packed(plan, draws.view(), like=like, stage_rows=stage_rows)

    def compile(self) -> Lock:
        """Compile the rows of each source in each stage of the other lock, evenly spread."""
        lock, length = self.without_stages(), self.mixture.sequence_length
        packed = [found for found in self.packed.values() if isinstance(found, _Packed)]
        stages: list[LockStage] = []
        for number, old in enumerate(self.old.stages):
            drawn = [int(found.stage_rows[number]) for found in packed]
            for rows, counts in exact_parts(drawn):
                part = sum(stage.name == old.name for stage in stages)
                stage = LockStage(
                    label=part_label(old.name, part, step=True),
                    part_of=old.name if part else None,
                    rows=rows,
                    tokens=rows * length,
                    block=sum(counts),
                    counts=counts,
                    wanted=tuple(ratio(Fraction(own, sum(drawn))) for own in drawn),
                    rows_by_source=tuple(rows // sum(counts) * count for count in counts),
                    sequence_length=old.sequence_length,
                    groups=old.groups,
                )
                stages.append(stage)
        sources = tuple(
            msgspec.structs.replace(source, like=found.like)
            for source, found in zip(lock.sources, packed, strict=True)
        )
        lock = msgspec.structs.replace(lock, sources=sources, stages=tuple(stages))
        return msgspec.structs.replace(lock, digest=lock.compute_digest())

    def warnings(self, lock: Lock) -> list[str]:
        """Say which stages of the other lock are none here, too."""
        there = {stage.name for stage in self.old.stages} - {stage.name for stage in lock.stages}
        return [
            *super().warnings(lock),
            *(
                f"stage {name!r} of the other lock fills no row here: its documents stand in the "
                "rows of the next one, or are those that fill no row"
                for name in sorted(there)
            ),
        ]


class _Draws:
    """The documents that a lock draws of a source, in order, as (first tokens, lengths) here.

    Args:
        most_last: documents to remember of the last ones.
        folder: for arrays of the size of the dataset.
        there, here: int64 [documents], ends of all documents in the dataset of the lock, and here.

    Attributes:
        drawn, begun, whole: documents of which the lock draws any tokens, the first, and all.
        tokens, tokens_there: of those begun.
        stage_tokens: tokens here up to the end of each stage of the lock.
        last: int64 [d], lengths of the last documents.
    """

    def __init__(
        self, lock: Lock, index: int, most_last: int, folder: Path, there: Int64, here: Int64
    ) -> None:
        self._lock, self._index, self._there, self._here = lock, index, there, here
        self._most_last = most_last
        self._seen = np.memmap(folder / "seen", np.int64, "w+", shape=there.shape)
        self._ever = np.memmap(folder / "ever", np.bool_, "w+", shape=there.shape)
        self.tokens = self.tokens_there = 0
        self.drawn = self.begun = self.whole = 0
        self.stage_tokens: list[int] = []
        self.last = np.zeros(0, np.int64)

    def __iter__(self) -> Iterator[tuple[Int64, Int64]]:
        schedule, rows = self._lock.schedule(), self._lock.open_rows(self._index)
        turn = int(schedule.epoch_rows[self._index])
        stages = np.cumsum([stage.rows_by_source[self._index] for stage in self._lock.stages])
        total, reached = int(stages[-1]), {0: 0}
        edges = [np.arange(0, total, _ROWS), np.arange(0, total, turn), stages]
        for low, high in pairwise(np.unique(np.concatenate(edges)).tolist()):
            drawn = schedule.drawn_rows(self._index, np.arange(low, high))
            document, start, inputs = _inputs(rows, drawn, self._there, self._lock.sequence_length)
            np.add.at(self._seen, document, inputs)
            begun = document[start == _start(self._there, document)]
            starts, lengths = _start(self._here, begun), _length(self._here, begun)
            self._ever[begun] = True
            self.begun += len(begun)
            self.tokens += int(lengths.sum())
            self.tokens_there += int(_length(self._there, begun).sum())
            self.last = np.append(self.last, lengths)[-self._most_last :]
            reached[high] = self.tokens
            yield starts, lengths
            if high % turn == 0 or high == total:
                self._count_epoch()
        self.stage_tokens = [reached[end] for end in stages.tolist()]

    def view(self) -> ViewInfo:
        """Return which documents are drawn at all."""
        kept = np.flatnonzero(self._ever)
        return ViewInfo(documents=len(kept), tokens=int(_length(self._here, kept).sum()))

    def _count_epoch(self) -> None:
        for low in range(0, len(self._seen), WINDOW):
            seen = self._seen[low : low + WINDOW]
            sizes = _length(self._there, np.arange(low, low + len(seen)))
            self.drawn += int((seen > 0).sum())
            self.whole += int(((seen > 0) & (seen == sizes)).sum())
            seen[:] = 0


def _start(ends: Int64 | NDArray[np.uint64], document: Int64) -> Int64:
    return np.where(document > 0, ends[document - 1], 0)


def _length(ends: Int64, document: Int64) -> Int64:
    return np.asarray(ends[document]) - _start(ends, document)


def _pieces(plan: RowPlan, rows: Int64) -> tuple[Int64, Int64, Int64]:
    """Return first token and tokens of each piece of some rows, and the pieces of each row."""
    low = _start(plan.ends, rows).astype(np.int64)
    counts = plan.ends[rows].astype(np.int64) - low
    at = ranges(low, counts)
    return plan.starts[at].astype(np.int64), plan.lengths[at].astype(np.int64), counts


def _inputs(
    plan: RowPlan | StreamRows, rows: Int64, ends: Int64, sequence_length: int
) -> tuple[Int64, Int64, Int64]:
    """Return what rows read: of each piece, in order, its document, first token, and inputs."""
    if isinstance(plan, StreamRows):
        low = rows * sequence_length
        first = np.searchsorted(ends, low, side="right")
        counts = np.searchsorted(ends, low + sequence_length - 1, side="right") - first + 1
        document, low = ranges(first, counts), np.repeat(low, counts)
        start = np.maximum(low, _start(ends, document))
        inputs = np.minimum(low + sequence_length, ends[document]) - start
    else:
        start, inputs, counts = _pieces(plan, rows)
        before, first = np.cumsum(inputs) - inputs, np.cumsum(counts) - counts
        # the last token of a row of S + 1 is a label alone
        room = sequence_length - (before - np.repeat(before[first], counts))
        inputs, document = np.minimum(inputs, room), np.searchsorted(ends, start, side="right")
    read = inputs > 0
    return document[read], start[read], inputs[read]


def _placed(in_order: RowPlan, seed: int, name: str) -> Iterator[PackedRows]:
    """Yield rows so that order `global` draws them as they stand in `in_order`."""
    for low in range(0, in_order.rows, _ROWS):
        rows = np.arange(low, min(low + _ROWS, in_order.rows))
        nothing = np.zeros_like(rows)
        sizes = np.full_like(rows, in_order.rows)
        epochs = SourceEpochs(seed=seed, names=(name,), source=nothing, rows=sizes, epoch=nothing)
        yield PackedRows(*_pieces(in_order, Shuffled().positions_of(rows, epochs)))


def _measured(plan: RowPlan, bounds: list[int], sequence_length: int) -> tuple[Int64, int]:
    """Return the rows that end between bounds, which count inputs, and most pieces of a row."""
    ended, done, most = np.zeros(len(bounds), np.int64), 0, 0
    for low in range(0, plan.rows, _ROWS):
        _, tokens, counts = _pieces(plan, np.arange(low, min(low + _ROWS, plan.rows)))
        sizes = np.add.reduceat(tokens, np.cumsum(counts) - counts)
        ends = done + np.cumsum(np.minimum(sizes, sequence_length))
        ended += np.searchsorted(ends, bounds, side="right")
        done, most = int(ends[-1]), max(most, int(counts.max()))
    return np.diff(ended, prepend=0), most


def _refuse_others(theirs: Dataset, ours: Dataset, where: str) -> None:
    """Refuse a dataset that has not the documents of the lock's, one by one."""
    different = "" if theirs.digest == ours.digest else _difference(theirs, ours)
    if different:
        raise InputError(
            f"this dataset has other documents than that of the lock: {different}",
            where=f"{printable(ours.store.root)} (from {where})",
            why="the lock draws documents by their numbers",
            fix=f"make it by olm-data tokenize --like {printable(theirs.store.root)}",
        )


def _difference(theirs: Dataset, ours: Dataset) -> str:
    """Return where the documents of two datasets first differ, "" where they do not."""
    number = 0
    for one, other in zip_longest(theirs.manifest.shards, ours.manifest.shards):
        if one is None or other is None or one.documents != other.documents:
            return "its shards hold other numbers of documents"
        there, here = (
            DocumentRows(dataset.store, shard.name, shard.documents).table(_COLUMNS)
            for dataset, shard in ((theirs, one), (ours, other))
        )
        if not there.equals(here):
            pairs = zip(there.to_pylist(), here.to_pylist(), strict=True)
            number += next(n for n, (a, b) in enumerate(pairs) if a != b)
            return f"document {number:,} is another one"
        number += one.documents
    return ""
