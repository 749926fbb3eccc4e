"""The way of records through one task: units are read, encoded and appended to the shard writers.

    units -> read -> digests -> | encode -> | holdout? -> BOS/EOS -> writer of train | of validation
             thread of its own  | thread    | the caller's thread
                 bad records -> quarantine
                 every record read ends in exactly one count of its input's account

Each stage takes an iterator and gives one, in order, so that a stage which leaves records out is
one more generator between two others. Only the last stage touches accounts and writers. Stages
overlap (`stage.Stage`); text is let go once it is encoded.

Also: stages of a task that overlap: each runs in a thread of its own, ahead of the one that
follows.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import as_mask, numbers
from olm_data.dataset.account import (
    BAD_LOCATIONS,
    BAD_REASONS,
    CONTAMINATED,
    INVALID,
    NO_TOKENS,
    NUMBERS,
    UNENCODABLE,
    BadRecord,
    InputAccount,
    invalid_text,
    pack,
    unaccounted,
)
from olm_data.dataset.inputs import InputFile, OnInvalid, ReadOptions, Unit
from olm_data.dataset.options import Settings
from olm_data.dataset.shard_writer import ShardWriter
from olm_data.encoders import Encoded, TextEncoder
from olm_data.encoders.base import chosen_of, ids_of
from olm_data.errors import InputError, printable
from olm_data.runners.base import Report
from olm_data.select.selection import DIGEST_BYTES, IdSet, content_hashes, document_digests
from olm_data.sources import read_units
from olm_data.sources.base import DocumentBatch, Drop
from olm_data.sources.buffers import choose, without
from olm_data.tokenization.batches import EncodedBatch, HashedBatch, delimit, document_rows
from olm_data.tokenization.decontaminate import EvalTexts
from olm_data.tokenization.encoded_parts import EncodedParts
from olm_data.tokenization.quarantine import Quarantine

T = TypeVar("T")


class TaskStage(Generic[T]):
    """Iterates over `items`, which are made in a thread of their own.

    The next item is made only while the items not yet done with (waiting, or the one in the
    consumer's hands) are below `limit` together: one item of any size passes, alone.

    Args:
        items: makes the items; it is used, and closed, in the thread only.
        size: bytes of an item.
        limit: bytes of items to have made and not yet done with.
        after: the stage that `items` takes from, if it is one too; it is stopped with this one.

    Raises:
        Whatever `items` raises, once, where the next item would have come.
    """

    def __init__(
        self,
        items: Generator[T, None, None],
        *,
        size: Callable[[T], int],
        limit: int,
        after: TaskStage[Any] | None = None,
    ) -> None:
        self.busy = 0.0
        """Seconds the stage was at work, without the time it waited for the stage before it."""
        self.idle = 0.0
        """Seconds the consumer waited for this stage."""
        self._items, self._size, self._limit, self._after = items, size, limit, after
        self._waiting: deque[tuple[T, int]] = deque()
        self._held = 0  # bytes waiting and in the consumer's hands
        self._in_hand = 0  # of these, in the consumer's hands
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> TaskStage[T]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()
        self._waiting.clear()

    def stop(self) -> None:
        """Make no more items, and end the iteration of whoever waits for one."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._after is not None:
            self._after.stop()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        start = perf_counter()
        with self._changed:
            self._held -= self._in_hand  # asking for the next says that the last is done with
            self._in_hand = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._ended or self._stopped)
            self.idle += perf_counter() - start
            if self._waiting and not self._stopped:
                item, self._in_hand = self._waiting.popleft()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def _work(self) -> None:
        try:
            while self._has_room():
                if not self._make():
                    break
            self._items.close()
        except BaseException as error:  # whatever it is, the consumer must see it
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._held < self._limit or self._stopped)
            return not self._stopped

    def _make(self) -> bool:
        """Make one item; False if there is none. It is not kept here while the next is made."""
        start, waited = perf_counter(), self._waited()
        try:
            item = next(self._items)
        except StopIteration:
            return False
        finally:
            self.busy += perf_counter() - start - (self._waited() - waited)
        size = self._size(item)
        with self._changed:
            self._waiting.append((item, size))
            self._held += size
            self._changed.notify_all()
        return True

    def _waited(self) -> float:
        return 0.0 if self._after is None else self._after.idle


BATCHES_AHEAD = 2
"""A stage stops while it has made this many times `batch_bytes` that the next is not done with."""


@dataclass(frozen=True, kw_only=True)
class TaskPipeline:
    """The stages of one task.

    Attributes:
        inputs, read: what to read and how.
        excluded: the ids to leave out, which notes those that a record had; or None.
        settings: of the plan.
        drops: bool [d], which documents read are dropped as duplicates; None drops none.
        evaluated: drops what shares words in a row with evaluation texts; None drops nothing.
        listed: reason -> filled with the ids of the documents dropped for it, of those that have
            one.
        encoder: what encodes.
        parts: what is encoded already, and keeps what more is; None keeps nothing.
    """

    inputs: Sequence[InputFile]
    read: ReadOptions
    settings: Settings
    excluded: IdSet | None
    drops: np.ndarray | None
    evaluated: EvalTexts | None = None
    listed: Mapping[str, list[str]] = field(default_factory=dict)
    encoder: TextEncoder
    parts: EncodedParts | None = None

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
        accounts = Accounts(units, self.inputs, self.read.on_invalid)
        limit = BATCHES_AHEAD * self.read.batch_bytes
        with (
            TaskStage(self._read(units), size=_text_bytes, limit=limit) as hashed,
            TaskStage(self._encode(hashed), size=_id_bytes, limit=limit, after=hashed) as encoded,
        ):
            clock = [0.0, 0.0]
            for batch in encoded:
                start = perf_counter()
                accounts.add(batch, quarantine)
                tokens = self._write(batch, writers, accounts)
                seconds = [hashed.busy, encoded.busy]
                report(
                    documents=batch.read.documents,
                    text_bytes=batch.text_bytes,
                    tokens=tokens,
                    dropped=batch.lost,
                    by_reference=batch.encoded.by_reference,
                    bad=sum(drop.reason in BAD_REASONS for drop in batch.read.dropped),
                    read_us=int(seconds[0] * 1e6) - int(clock[0] * 1e6),
                    encode_us=int(seconds[1] * 1e6) - int(clock[1] * 1e6),
                    write_us=int((perf_counter() - start) * 1e6),
                )
                clock = seconds
                del batch  # or it would be kept while the next one is waited for
        return accounts.finished(self.excluded)

    def _read(self, units: Sequence[Unit]) -> Generator[HashedBatch, None, None]:
        """Yield the documents of the units with their digests: first stage."""
        first, reason = 0, "near_duplicate" if self.settings.minhash else "duplicate"
        for batch in read_units(self.inputs, units, self.read, self.excluded):
            digests = document_digests(batch.data, batch.offsets)
            if self.drops is not None:
                kept = ~self.drops[first : first + batch.documents]
                first += batch.documents
                if len(kept) < batch.documents:
                    break
                batch, digests = self._chosen(batch, digests, kept, reason)
            if self.evaluated is not None:
                kept = ~self.evaluated.found(batch, chats=self.read.chat is not None)
                batch, digests = self._chosen(batch, digests, kept, CONTAMINATED)
            made = [(batch, digests)]
            del batch  # the text may be large: once it is encoded nobody has it
            yield made.pop()
        if self.drops is not None and first != len(self.drops):
            raise InputError(
                "the input gave other documents when it was read again",
                where=self.inputs[units[0].input].path,
                why="the duplicates found the first time would not be those dropped now",
                fix="once the input no longer changes, delete the output and run the command again",
            )

    def _chosen(
        self, batch: DocumentBatch, digests: bytes, kept: np.ndarray, reason: str
    ) -> tuple[DocumentBatch, bytes]:
        """Return the documents that are kept, and their digests; list those that are not."""
        if reason in self.listed and batch.ids is not None:
            ids = batch.ids.filter(as_mask(~kept)).to_pylist()
            self.listed[reason].extend(id for id in ids if id is not None)
        digests = np.frombuffer(digests, f"V{DIGEST_BYTES}")[kept].tobytes()
        return choose(batch, kept, reason), digests

    def _encode(self, batches: Iterable[HashedBatch]) -> Generator[EncodedBatch, None, None]:
        """Yield the documents as ids: second stage."""
        for hashed in batches:
            encoded = self._encoded(hashed)
            del hashed  # the text may be large: it is let go before the next is waited for
            yield encoded
            del encoded

    def _encoded(self, hashed: HashedBatch) -> EncodedBatch:
        batch, digests = hashed

        def place(k: int) -> str:
            source = self.inputs[int(batch.inputs[k])]
            return f"{source.path}, {source.position} {int(batch.positions[k])}"

        made = Encoded(np.empty(0, np.uint32), np.zeros(1, np.int64), 0, np.empty(0, int), {}, 0)
        rows = None
        if batch.documents:  # else it is here for what was dropped
            made = self._made(batch, digests, place)
            batch, made, digests = self._left_out(batch, made, digests)
            rows = document_rows(batch, content_hashes(digests), self.read.keep_schema)
        return EncodedBatch(
            read=replace(batch, data=batch.data[:0].copy()),
            encoded=made,
            rows=rows,
            digests=digests,
            text_bytes=len(batch.data),
        )

    def _made(self, batch: DocumentBatch, digests: bytes, place: Callable[[int], str]) -> Encoded:
        made = None if self.parts is None else self.parts.find(digests)
        if made is None:
            made = self.encoder.encode(batch.data, batch.offsets, place)
            if self.parts is not None:
                self.parts.keep(digests, made)
        return made

    def _left_out(
        self, batch: DocumentBatch, made: Encoded, digests: bytes
    ) -> tuple[DocumentBatch, Encoded, bytes]:
        """Drop the documents that cannot be encoded, or hold what `on_unknown` says to drop."""
        failed = np.zeros(batch.documents, bool)
        failed[list(made.failed)] = True
        unknown = (made.unknown > 0) & (self.read.on_unknown == "drop") & ~failed
        kept = ~(failed | unknown)
        if kept.all():
            return batch, made, digests
        drops = [
            Drop.of(
                made.reasons.get(k, UNENCODABLE),
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
        trained, cut = made.trained, made.cut
        if trained is not None:
            trained, _ = chosen_of((trained, made.offsets), kept)
        made = made._replace(
            ids=ids,
            offsets=offsets,
            unknown=made.unknown[kept],
            failed={},
            trained=trained,
            cut=None if cut is None else cut[kept],
        )
        return batch, made, np.frombuffer(digests, f"V{DIGEST_BYTES}")[kept].tobytes()

    def _write(self, batch: EncodedBatch, writers: list[ShardWriter], accounts: Accounts) -> int:
        """Append a batch to the writers: last stage. Returns how many tokens."""
        if not batch.read.documents:
            return 0
        ids, offsets = batch.encoded.ids, batch.encoded.offsets
        hashes = content_hashes(batch.digests)
        empty, bos, eos = np.diff(offsets) == 0, self.settings.bos, self.settings.eos
        below = self.settings.holdout_below
        held_out = hashes < np.uint64(below) if below else np.zeros(len(hashes), bool)
        accounts.split(batch, empty, held_out)
        total = 0
        for writer, chosen in zip(writers, (~held_out & ~empty, held_out & ~empty), strict=False):
            marked, ends = delimit(ids, offsets, chosen, bos=bos, eos=eos)
            rows = batch.rows
            if not chosen.all():
                rows = rows.take(numbers(np.flatnonzero(chosen), pa.int64()))
            trained = batch.encoded.trained
            if trained is not None:  # such documents have neither BOS nor EOS
                trained, _ = chosen_of((trained, offsets), chosen)
            writer.append(marked, ends, rows, trained)
            total += len(marked)
        return total


def _text_bytes(hashed: HashedBatch) -> int:
    return len(hashed[0].data) + _raw_bytes(hashed[0].dropped)


def _id_bytes(batch: EncodedBatch) -> int:
    return int(batch.encoded.ids.nbytes) + _raw_bytes(batch.read.dropped)


def _raw_bytes(drops: Iterable[Drop]) -> int:
    return sum(len(drop.raw) for drop in drops)


@dataclass
class _Counts:
    """One input's counts so far; attributes as in `InputAccount`, its `NUMBERS` by name."""

    units: list[tuple[int, int]] = field(default_factory=list)
    numbers: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    bad: list[BadRecord] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class Accounts:
    """The accounts of a task's inputs while its batches come in."""

    def __init__(
        self, units: Iterable[Unit], inputs: Sequence[InputFile], on_invalid: OnInvalid
    ) -> None:
        self._inputs, self._on_invalid = inputs, on_invalid
        self._of: dict[int, _Counts] = {}
        for unit in units:
            self._of.setdefault(unit.input, _Counts()).units.append((unit.start, unit.stop))

    def add(self, batch: EncodedBatch, quarantine: Quarantine) -> None:
        """Count what a batch's records are before they are parted into splits."""
        read, special_hits = batch.read, batch.encoded.special_hits
        if read.rows_in != read.documents + batch.lost:
            raise unaccounted(
                f"{read.rows_in:,} records read, {read.documents:,} documents, "
                f"{batch.lost:,} left out",
                ", ".join(self._inputs[index].path for index in self._of),
            )
        for (index, reason), count in read.skipped.items():
            self._of[index].dropped[reason] += count
        for index, count in read.replaced.items():
            self._of[index].numbers["replaced"] += count
        if special_hits:  # of a whole batch; the account of its first input carries them
            first = (*read.inputs[:1].tolist(), *(drop.input for drop in read.dropped))
            index = first[0] if first else next(iter(read.skipped))[0]
            self._of[index].numbers["special_hits"] += special_hits
        for drop in read.dropped:
            account = self._of[drop.input]
            account.dropped[drop.reason] += 1
            if drop.reason == INVALID and self._on_invalid == "error":
                source = self._inputs[drop.input]
                raise invalid_text(
                    f"{source.path}, {source.position} {drop.position}: {drop.detail}"
                )
            if drop.reason in BAD_REASONS:
                quarantine.add(drop)
                if len(account.bad) < BAD_LOCATIONS:
                    account.bad.append(BadRecord(drop.position, drop.reason, drop.detail))

    def split(self, batch: EncodedBatch, empty: np.ndarray, held_out: np.ndarray) -> None:
        """Count a batch's documents by split.

        Args:
            empty: bool [d], the text has no token.
            held_out: bool [d].
        """
        for first, last in runs(batch.read.inputs):
            index = int(batch.read.inputs[first])
            account = self._of[index]
            account.digest.update(batch.digests[first * DIGEST_BYTES : last * DIGEST_BYTES])
            none, held = empty[first:last], held_out[first:last]
            unknown, cut = batch.encoded.unknown[first:last], batch.encoded.cut
            account.numbers.update(
                documents=int((~held & ~none).sum()),
                held_out=int((held & ~none).sum()),
                unknown_tokens=int(unknown.sum()),
                unknown_documents=int((unknown > 0).sum()),
                cut=0 if cut is None else int((cut[first:last] > 0).sum()),
            )
            if none.any():
                account.dropped[NO_TOKENS] += int(none.sum())

    def finished(self, excluded: IdSet | None = None) -> list[InputAccount]:
        """Return the accounts, in order of first appearance, with their digests.

        Args:
            excluded: knows which of the ids to leave out the task met; told on its first input.
        """
        met = "" if excluded is None else pack(excluded.found)
        return [
            InputAccount(
                input=index,
                units=tuple(counts.units),
                dropped=dict(sorted(counts.dropped.items())),
                bad=tuple(counts.bad),
                sha256=counts.digest.hexdigest(),
                excluded="" if place else met,
                **{name: counts.numbers[name] for name in NUMBERS},
            )
            for place, (index, counts) in enumerate(self._of.items())
        ]


def runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return the [first, last) ranges of equal neighbours in a non-empty 1-D array."""
    cuts = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(values)], strict=True))
