"""The loss ledger: what each piece of a document cost as it was trained, by document.

    losses of labels (train step) --sum by piece, on the device--> [2, pieces] a micro-batch
        --copied beside the step--> host, read with the metrics of the step
        --thread: addresses, Parquet--> RUN/ledger/   (`olm_data.extensions.ledger.files`)

Each rank writes the pieces of its own rows. The loss computes the losses of labels in any case, so
a run has the same bits with and without a ledger. A checkpoint waits until the pieces of the steps
before it are written, and a resumed run first removes what lies beyond its checkpoint: kills leave
no step twice and none out. Where the save folder is remote, the files go there before each
checkpoint, and come back where a run goes on without them.

The loss ledger of a run whose save folder is remote: its files lie there too, under `ledger/`.

    <work_dir>/ledger/*.parquet --send, before each checkpoint--> <save folder>/ledger/
    <save folder>/ledger/ --fetch_ledger, at a resume--> <work_dir>/ledger/

So a run that goes on from a checkpoint on another machine has the ledger of all steps before. The
save folder is what counts: local files that it lacks, or has otherwise, are of a history that is
lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import PositiveInt
from olm_data.dataset.dataset import Dataset
from olm_data.errors import OlmError, UsageError, shown
from olm_data.extensions.ledger.files import (
    LEDGER,
    MAX_FILE,
    Entries,
    LedgerInfo,
    LedgerWriter,
    is_ledger_name,
    keep_until,
    lacking,
    ledger_files,
)
from olm_data.mixture.lock import Lock
from olm_data.packing.concat import StreamRows
from olm_data.packing.row_plan import RowPlan
from olm_data.storage.disk import make_folder, write_durable
from olm_data.storage.store import Store, is_remote
from olm_train.callbacks.base import Callback
from olm_train.callbacks.sequence_length_scheduler import SequenceLengthSchedulerCallback
from olm_train.data.batch import Batch
from olm_train.model.loss import sum_by_piece

Int64 = NDArray[np.int64]
Floats = NDArray[np.float64]
MAX_REMOTE = 64
"""Shards of a remote dataset whose document ends are held in memory."""


class PieceAddresses:
    """Says of which documents trained rows are made; opens each source when it is first met.

    Args:
        lock: of the run.
    """

    def __init__(self, lock: Lock) -> None:
        self.lock, self._schedule = lock, lock.schedule()
        self._sources: dict[int, tuple[Dataset, RowPlan | StreamRows]] = {}

    def entries(
        self, step: int, rows: Int64, begin: Int64, size: Int64, *, tokens: Int64, nats: Floats
    ) -> Entries:
        """Return what the ledger says of the pieces of some rows.

        Args:
            step: that they were trained in.
            rows: int64 [m], rows of the run, laid one behind the other, each `sequence_length` of
                the lock long.
            begin, size: int64 [pieces], where in them each piece begins, and its tokens with those
                that pad the row. Pieces that are padding alone have no address.
            tokens, nats: [pieces], labels that count, and the sum of their losses.
        """
        which, offset = np.divmod(begin, self.lock.sequence_length)
        origin = self._schedule.locate(rows)
        source, shard = origin.source[which], np.empty(len(begin), object)
        document, start, stop = (np.zeros(len(begin), np.int64) for _ in range(3))
        for index in np.unique(source).tolist():
            mine = np.flatnonzero(source == index)
            dataset, plan = self._source(index)
            token = _tokens(plan, origin.row[which[mine]], offset[mine])
            number, document[mine], start[mine], stop[mine] = _documents(dataset, token)
            used, inverse = np.unique(number, return_inverse=True)
            names = [dataset.manifest.shards[n].name for n in used.tolist()]
            shard[mine] = np.array(names, object)[inverse]
        sources = np.array([each.name for each in self.lock.sources], object)
        return Entries(
            step=step,
            row=rows[which],
            source=sources[source].tolist(),
            shard=shard.tolist(),
            document=document,
            start=start,
            stop=np.minimum(stop, start + size),  # what pads a row counts to its last piece
            epoch=origin.epoch[which],
            tokens=tokens,
            nats=nats,
        )

    def _source(self, index: int) -> tuple[Dataset, RowPlan | StreamRows]:
        if index not in self._sources:
            remote = is_remote(self.lock.location(self.lock.sources[index].name))
            most = MAX_REMOTE if remote else None
            dataset = self.lock.open_dataset(index, verify="off", max_open=most)
            self._sources[index] = dataset, self.lock.open_rows(index, verify="off")
        return self._sources[index]


def _tokens(plan: RowPlan | StreamRows, row: Int64, offset: Int64) -> Int64:
    """Return which token of the dataset stands at an offset of each row, int64 [pieces]."""
    if isinstance(plan, StreamRows):
        return row * plan.sequence_length + offset
    token = np.zeros(len(row), np.int64)
    for number in np.unique(row).tolist():
        mine = row == number
        starts, sizes = np.array(plan.pieces(number), np.int64).T
        ends = np.cumsum(sizes)
        piece = np.searchsorted(ends, offset[mine], side="right")
        token[mine] = starts[piece] + offset[mine] - (ends - sizes)[piece]
    return token


def _documents(dataset: Dataset, token: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Return shard, document, position in the document, and the document's length, of tokens."""
    shard = np.searchsorted(dataset.token_ends, token, side="right")
    document, position, length = (np.zeros(len(token), np.int64) for _ in range(3))
    for index in np.unique(shard).tolist():
        mine, info = shard == index, dataset.manifest.shards[index]
        ends = dataset.shard(index).ends
        local = token[mine] - (int(dataset.token_ends[index]) - info.tokens)
        number = np.searchsorted(ends, local.astype(np.uint64), side="right")
        before = np.where(number > 0, ends[np.maximum(number, 1) - 1], 0).astype(np.int64)
        document[mine] = number + int(dataset.document_ends[index]) - info.documents
        position[mine] = local - before
        length[mine] = ends[number].astype(np.int64) - before
    return shard, document, position, length


class LedgerSender:
    """Copies the files that one rank writes; those that the store refuses wait.

    Args:
        store: the save folder.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sent: set[Path] = set()

    def send(self, written: list[Path]) -> None:
        """Return when all these files are in the store.

        Raises:
            StorageError: one is not; the next call tries again.
        """
        for path in written:
            if path not in self._sent:
                self._store.put(f"{LEDGER}/{path.name}", path.read_bytes())
                self._sent.add(path)


def fetch_ledger(store: Store, folder: Path, step: int | None) -> None:
    """Make the ledger of a folder that of the store, both up to a step.

    Args:
        store: the save folder.
        folder: of the run on this machine.
        step: of the checkpoint that the run goes on from; None: a new run, all go.

    Raises:
        ValidationError: a file is not one that a run writes.
        ResourceError, StorageError: the disk or the store refuses it.
    """
    there = {
        Path(entry.name).name: entry.size
        for entry in store.entries(LEDGER)
        if is_ledger_name(Path(entry.name).name)
    }
    if not there:  # the first start, or its ledger was never sent
        keep_until(folder, step)
        return
    local = {file.path.name: file.path for file in ledger_files(folder)}
    if step is not None:
        make_folder(str(folder / LEDGER))
        for name, path in local.items():
            if name not in there:
                path.unlink(missing_ok=True)
        for name in there:
            data = store.read(f"{LEDGER}/{name}", limit=MAX_FILE)
            if name not in local or local[name].read_bytes() != data:
                write_durable(folder / LEDGER / f"{name}.tmp-fetched", data)
                (folder / LEDGER / f"{name}.tmp-fetched").replace(folder / LEDGER / name)
    changed = keep_until(folder, step)
    kept = {file.path.name: file.path for file in ledger_files(folder)}
    for name in there:
        if name not in kept:
            store.delete(f"{LEDGER}/{name}")
        elif kept[name] in changed:
            store.put(f"{LEDGER}/{name}", kept[name].read_bytes())


MOST_WAITING = 512
"""Steps that may wait for the thread before the training waits for it."""


@dataclass
class _Taken:
    """The micro-batches of a step, on their way to the host.

    Attributes:
        parts: of each micro-batch: fp64 [nats | labels | offsets | rows] in one tensor, the number
            of its pieces, and its sequence length.
        arrived: when all of them are there; None: they are.
    """

    parts: list[tuple[Tensor, int, int]]
    arrived: torch.cuda.Event | None = None


@dataclass(kw_only=True)
class LossLedgerCallback(Callback):
    """Writes the loss of every piece of a document, read by `olm-data show ledger`.

    Attributes:
        enabled: write the ledger, where `loss_ledger` is given at all.
        steps_per_file: steps in a file. A checkpoint, and the end of the run, end one too.
        max_rows_per_file: pieces in a file, if that comes first.
    """

    priority: ClassVar[int] = 2

    enabled: bool = True
    steps_per_file: PositiveInt = 100
    max_rows_per_file: PositiveInt = 1 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._taken: _Taken | None = None
        self._steps: dict[int, _Taken] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._sender: LedgerSender | None = None
        self._work: list[Future[None]] = []
        self._refused = False

    def pre_train(self) -> None:
        trainer, loader = self.trainer, self.trainer.data_loader
        lock: Lock | None = getattr(loader, "lock", None)
        if lock is None:
            raise UsageError(
                "the loss ledger needs the documents of the batches, which only a mixture lock has",
                where="trainer.callbacks.loss_ledger",
                fix="train on a lock (olm-data mix), or leave the ledger out",
            )
        for name, each in trainer.callbacks.items():
            if isinstance(each, SequenceLengthSchedulerCallback) and each.truncate:
                raise UsageError(
                    "the loss ledger cannot tell which documents truncated rows hold",
                    where=f"trainer.callbacks.{name}.truncate",
                    fix="leave truncate out, or the ledger",
                )
        world, folder = trainer.world, trainer.work_dir
        reached = trainer.step if trainer.resumed else None
        self._sender = None
        if is_remote(trainer.save_folder):
            store = Store(trainer.save_folder)
            self._sender = LedgerSender(store)
            world.on_main(lambda: fetch_ledger(store, folder, reached))
        else:
            world.on_main(lambda: keep_until(folder, reached))
        if reached is not None:
            begins = world.on_main(lambda: not ledger_files(folder))
            if begins:
                trainer.say(f"note: {LEDGER}/ begins after step {reached:,}")
            holes = world.on_main(lambda: lacking(folder, reached))
            for rank, steps in holes.items():
                text = _without(steps, rank)
                trainer.say(f"warning: {text}: they were not written when the run ended")
        keep_until(folder, reached)  # where this machine's disk is not that of rank 0
        info = LedgerInfo(rank=world.reader, world_size=world.readers, lock=lock.digest)
        self._writer = LedgerWriter(
            folder, info, steps_per_file=self.steps_per_file, max_rows=self.max_rows_per_file
        )
        self._addresses = PieceAddresses(lock)
        self._steps.clear()
        self._thread = ThreadPoolExecutor(1, "ledger")

    def pre_step(self, batches: Sequence[Any]) -> None:
        # Only here: steps that are repeated to be compared, or tried, are not trained.
        self._taken = _Taken([])
        self.trainer.train_module.watch_losses = self._take

    def post_step(self) -> None:
        taken, self._taken = self._taken, None
        self.trainer.train_module.watch_losses = None
        if taken is None or not taken.parts:
            raise UsageError(
                "the loss ledger got no losses: the loss, or the train module, has only their sum",
                where="trainer.callbacks.loss_ledger",
                fix="use another train_module.loss.name, such as chunked; a module of your own "
                "calls watch_losses",
            )
        if self.trainer.world.device.type == "cuda":
            taken.arrived = torch.cuda.Event()
            taken.arrived.record()
        self._steps[self.trainer.step] = taken

    @torch.no_grad()
    def _take(self, batch: Batch, by_label: Tensor) -> None:
        """Sum the losses of a micro-batch by piece, and send them to the host."""
        assert self._taken is not None
        sums = sum_by_piece(by_label, batch.labels, batch.cu_seqlens)  # [2, pieces]
        packed = torch.cat([sums.flatten(), batch.cu_seqlens, batch.rows])  # whole below 2^53
        length = int(batch.input_ids.shape[1])
        self._taken.parts.append((packed.to("cpu", non_blocking=True), sums.shape[1], length))

    def log_metrics(self, step: int, metrics: Any) -> None:
        taken = self._steps.pop(step, None)
        if taken is not None and self._thread is not None and self.trainer.world.speaks:
            self._begin(self._thread.submit(self._write, step, taken))

    def state_dict(self) -> JsonObject:
        # A checkpoint is being made: its steps are trained once, so what they cost is written now.
        if self._thread is not None:
            self._begin(self._thread.submit(self._flush))
            if self._sender is not None:
                self._begin(self._thread.submit(self._send, self._sender))
            self._finish(0)
        return {}

    def close(self) -> None:
        self.trainer.train_module.watch_losses = None
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        thread.submit(self._flush)
        thread.shutdown(wait=True)
        self._work.clear()
        if waiting := self._writer.waiting:
            steps = (self._writer.take_lost() or waiting)[0], waiting[1]
            self._say(_without(steps, self.trainer.world.reader))

    def _begin(self, work: Future[None]) -> None:
        self._work.append(work)
        self._finish(MOST_WAITING)

    def _finish(self, waiting: int) -> None:
        """Raise what the thread raised; wait until no more than so many jobs wait for it."""
        while self._work and (len(self._work) > waiting or self._work[0].done()):
            self._work.pop(0).result()

    def _write(self, step: int, taken: _Taken) -> None:
        """In the thread: find the documents of a step, and add them to the ledger."""
        if taken.arrived is not None:
            taken.arrived.synchronize()
        self._safely(f"the losses of step {step:,}", lambda: self._add(step, taken))

    def _add(self, step: int, taken: _Taken) -> None:
        longest = self._addresses.lock.sequence_length
        rows, begin, size, nats, tokens = [], [], [], [], []
        before = 0
        for packed, count, length in taken.parts:
            sums, ends, ids = np.split(packed.numpy(), [2 * count, 3 * count + 1])
            ends = ends.astype(np.int64)
            of_piece, labels = sums.reshape(2, count)
            real = labels > 0
            begin.append(ends[:-1][real] + before)
            size.append(np.diff(ends)[real])
            nats.append(of_piece[real])
            tokens.append(labels[real].astype(np.int64))
            rows.append(ids.astype(np.int64)[:: longest // length])
            before += int(ends[-1])
        of_pieces = map(np.concatenate, (rows, begin, size))
        self._writer.add(
            self._addresses.entries(
                step, *of_pieces, tokens=np.concatenate(tokens), nats=np.concatenate(nats)
            )
        )

    def _flush(self) -> None:
        self._safely("the last losses", lambda: self._writer.flush())

    def _send(self, sender: LedgerSender) -> None:
        self._safely("files", lambda: sender.send(self._writer.written))

    def _safely(self, what: str, action: Any) -> None:
        """Warn of an error of the disk or of the data, once until it is over: training goes on."""
        try:
            action()
        except (OlmError, OSError) as error:
            if not self._refused:
                self._say(
                    f"{what} of rank {self.trainer.world.reader} could not be written to "
                    f"{LEDGER}/: {error}\n  training goes on; what waits to be written is tried "
                    "again"
                )
            self._refused = True
            return
        if self._writer.waiting is None:
            self._refused = False
            if lost := self._writer.take_lost():
                self._say(_without(lost, self.trainer.world.reader))

    def _say(self, text: str) -> None:
        """Say it on any rank: each speaks for its own rows."""
        print(shown(f"warning: {text}"), file=sys.stderr, flush=True)


def _without(steps: tuple[int, int], rank: int) -> str:
    """Say which steps of a rank the ledger lacks, the first and last given."""
    first, last = steps
    which = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    return f"{LEDGER}/ has no losses of {which} of rank {rank}"
