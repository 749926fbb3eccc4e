"""Shards of remote datasets for a reader: fetched ahead by the known future, read from the cache.

    prefetch(steps, shards) -> threads fetch what is needed next, while room can be made for it
    reached(step)          -> what was used before may now be given up
    open(number)           -> CachedShard: .read(...) fetches again what vanished or was damaged

The order of a run is a pure function, so what is needed next is known and not guessed. All ranks of
a machine share the cache and look ahead over the rows of all of them, so that none gives up what
another needs.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.record import HEADER_BYTES, RECORD
from olm_data.dataset.shard import ENDS, LABELS, Shard
from olm_data.errors import OlmError
from olm_data.rows.shard_cache import NextUses, RemoteShard, ShardCache, Stopped
from olm_data.threads import end_of

log = logging.getLogger(__name__)

FETCHERS = 4
"""Shards fetched at a time ahead of need."""

_BEHIND = 4  # steps: another rank may not have got as far as this one
_TRIES = 3


class RemoteShards:
    """The shards of several datasets, numbered one after another; only remote ones are asked for.

    Args:
        datasets: the datasets.
        cache: where their shards go.

    Attributes:
        fetched_again: shards that vanished from the cache, or were damaged there.
    """

    def __init__(self, datasets: Sequence[Dataset], cache: ShardCache) -> None:
        self.cache, self.fetched_again = cache, 0
        self._places = [(d, i) for d in datasets for i in range(len(d.manifest.shards))]
        self._prefetch = _Prefetch(self)
        self._threads: list[threading.Thread] = []

    def prefetch(self, steps: Any, shards: Any) -> None:
        """Replace what is known of the future, and fetch ahead from now on.

        Args:
            steps: integers [m], ascending or not.
            shards: integers [m], the shard that is used at each.
        """
        self._prefetch.prefetch(NextUses(steps, shards))
        if not self._threads:
            self._threads = [
                threading.Thread(target=_fetch_ahead, args=(self._prefetch,), daemon=True)
                for _ in range(FETCHERS)
            ]
            self._stop = weakref.finalize(
                self, _stop, self._prefetch, self._threads, weakref.ref(self)
            )
            for thread in self._threads:
                thread.start()

    def reached(self, step: int) -> None:
        """Say that this rank now reads a step."""
        self._prefetch.reached(step)

    def close(self) -> None:
        """Stop fetching ahead, and wait for the threads; reading goes on to work."""
        if self._threads:
            self._stop()
            self._threads = []
            self._prefetch = _Prefetch(self)

    def open(self, number: int) -> CachedShard:
        """Return a shard, fetched if it was not there.

        Raises:
            StorageError, ValidationError: it cannot be had, or is not what its manifest says.
        """
        return CachedShard(self, number)

    def shard(self, number: int) -> Shard:
        """Return a shard as it lies in the cache, after as many tries as files are lost."""
        dataset, index = self._places[number]
        wanted = remote_shard(dataset, index)
        for last in (*[False] * (_TRIES - 1), True):
            folder = self.cache.fetch(wanted, self._prefetch.next_uses)
            assert folder is not None  # an urgent fetch may give up anything
            try:
                return dataset.open_shard(index, copy=str(folder))
            except (OlmError, FileNotFoundError) as error:
                if last:
                    raise
                self.lose(number, error)
        raise AssertionError

    def lose(self, number: int, error: Exception) -> None:
        """Take note that a shard in the cache is gone or damaged, and remove what is left.

        One that was given up for room since it was opened is no loss.
        """
        wanted = remote_shard(*self._places[number])
        if self.cache.given_up(wanted):
            return
        self.fetched_again += 1
        log.warning(
            "a cached shard was lost and is fetched again (%d so far): %s: %s",
            self.fetched_again,
            self.cache.path(wanted),
            error.what if isinstance(error, OlmError) else error,
        )
        self.cache.discard(wanted)


class CachedShard:
    """A shard in the cache that may vanish at any time; reads like a `Shard` without a map."""

    def __init__(self, owner: RemoteShards, number: int) -> None:
        self._owner, self._number = owner, number
        self._shard = owner.shard(number)

    @property
    def ends(self) -> np.ndarray:
        """uint64 [documents], as of `Shard`; in memory."""
        return self._shard.ends

    @property
    def labels(self) -> np.ndarray | None:
        """As of `Shard`; in memory."""
        return self._shard.labels

    def is_checked(self, starts: np.ndarray, width: int) -> np.ndarray:
        """Return bool [m], all false: each read is checked."""
        return self._shard.is_checked(starts, width)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop), fetching the shard again if it was lost.

        Raises:
            StorageError, ValidationError: it cannot be had any more.
        """
        for _ in range(_TRIES - 1):
            try:
                return self._shard.read(start, stop)
            except (OlmError, FileNotFoundError) as error:
                self._owner.lose(self._number, error)
                self._shard = self._owner.shard(self._number)
        return self._shard.read(start, stop)


def remote_shard(dataset: Dataset, index: int) -> RemoteShard:
    """Return what has to be fetched to read a shard: tokens, ends, labels, commit record."""
    manifest, info = dataset.manifest, dataset.manifest.shards[index]
    files: dict[str, tuple[int | None, str]] = {
        manifest.tokens_name(info): (manifest.tokens_bytes(info), info.sha256.tokens),
        info.name + ENDS: (HEADER_BYTES + 8 * info.documents, info.sha256.ends),
        info.name + RECORD: (None, info.sha256.record),
    }
    if info.runs is not msgspec.UNSET:
        files[info.name + LABELS] = (HEADER_BYTES + 8 * info.runs, info.sha256["labels"])
    return RemoteShard(dataset.store, files)


class _Prefetch:
    """What the fetching threads share: the future, where the reader is, what is still to fetch."""

    def __init__(self, owner: RemoteShards) -> None:
        self.changed = threading.Condition()
        self.closed = False
        self.cache, self._places = owner.cache, owner._places
        self._uses, self._step = NextUses(), 0
        self._todo: list[int] = []  # the shard that is needed last first
        self._keys: dict[int, str] = {}

    def prefetch(self, uses: NextUses) -> None:
        with self.changed:
            self._uses = uses
            self._todo = uses.in_order(max(0, self._step - _BEHIND))[::-1]
            self.changed.notify_all()

    def reached(self, step: int) -> None:
        with self.changed:
            self._step = step
            self.changed.notify_all()

    def next_uses(self) -> Mapping[str, int]:
        """Return the step of the next use of each shard whose use is known, by key."""
        with self.changed:
            step = max(0, self._step - _BEHIND)
            uses = {n: self._uses.next_use(n, step) for n in self._uses.in_order(step)}
        return {self.key(number): use for number, use in uses.items()}

    def key(self, number: int) -> str:
        if number not in self._keys:
            self._keys[number] = remote_shard(*self._places[number]).key
        return self._keys[number]

    def take(self) -> tuple[int, int] | None:
        """Wait for the next shard to fetch; return it and its step, None once closed."""
        with self.changed:
            while not self.closed:
                while self._todo:
                    number = self._todo.pop()
                    use = self._uses.next_use(number, max(0, self._step - _BEHIND))
                    shard = remote_shard(*self._places[number])
                    if not self.cache.path(shard).is_dir():
                        return number, use
                self.changed.wait()
        return None

    def put_back(self, number: int) -> None:
        """There was no room: try again when the reader has gone on."""
        with self.changed:
            self._todo.append(number)
            if not self.closed:
                self.changed.wait()


def _fetch_ahead(prefetch: _Prefetch) -> None:
    while (taken := prefetch.take()) is not None:
        number, use = taken
        shard = remote_shard(*prefetch._places[number])
        try:
            found = prefetch.cache.fetch(
                shard, prefetch.next_uses, later_than=use, stopped=lambda: prefetch.closed
            )
        except Stopped:
            return
        except OlmError as error:  # the reader will meet it, if it lasts, and end the run
            log.warning("fetching ahead failed: %s: %s", error.where, error.what)
            continue
        if found is None:
            prefetch.put_back(number)


def _stop(
    prefetch: _Prefetch, threads: Sequence[threading.Thread], owner: weakref.ref[RemoteShards]
) -> None:
    with prefetch.changed:
        prefetch.closed = True
        prefetch.changed.notify_all()
    end_of(threads, owner)
