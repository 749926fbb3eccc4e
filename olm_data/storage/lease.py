"""One writer at a time in a folder, local or remote, on one machine or many.

    acquire -> lease-000007.json, created only where there is none; the highest number holds
            -> beat: a thread writes it anew while the holder lives
    check   -> own lease still there, and none above it? else LeaseLostError (exit 7)
    release -> given back: the next one starts at once

What keeps two apart is a create that fails where there is something. The number is the fence:
whoever was taken over finds a higher one (or his own gone) before he publishes anything, by
`check`. A sign of life is written only over the lease that was just read: who was paused in between
neither brings a removed lease back nor writes over another's, nor removes it, unless the store
knows no such condition (`olm-data doctor`). A lease is taken over once it was given back, once its
process is known to be dead (same machine), by a later start of the same Slurm job, or once it has
not changed for its take-over time by the watcher's own monotonic clock; clocks of two machines are
never compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from olm_data.decoding import decode_typed
from olm_data.errors import ConflictError, OlmError, printable
from olm_data.storage.disk import io_errors, make_folder
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.process import Process, ProcessState, batch_job, state_of, this_process
from olm_data.storage.store import Store


class Seen(NamedTuple):
    """What a file held, and the name of that version: "" on a disk, or where none is told."""

    data: bytes
    version: str


def read_versioned(store: Store, name: str, size: int) -> Seen | None:
    """Return the first `size` bytes of a file, with their version; None where there is none.

    Raises:
        StorageError: the store does not answer.
    """
    try:
        if not store.remote:
            return Seen(store.read(name, 0, size), "")
        found = store.bucket.piece(store.key(name), 0, size)
    except FileNotFoundError:
        return None
    except RemoteFailure as failure:
        if failure.status == 416:  # no byte at all
            return Seen(b"", "")
        raise
    return Seen(found.data, found.etag)


def put_if(store: Store, name: str, data: bytes, *, over: Seen | None) -> None:
    """Write a small file.

    Args:
        data: as many bytes as `over` has.
        over: what it is to take the place of; None creates it. A version "" of a remote store, and
            `single_writer`, are no condition.

    Raises:
        ConflictError: something else is there by now, or nothing.
    """
    url = store.url(name)
    try:
        if not store.remote:
            with io_errors(url, writing=over is None):
                write_in_place(url, data, None if over is None else over.data)
        elif over is None:
            store.create(name, data)
        elif store.single_writer or not over.version:
            store.put(name, data)
        else:
            store.bucket.put(store.key(name), data, replaces=over.version)
    except (FileExistsError, FileNotFoundError) as error:
        raise ConflictError("another process has written this file", where=url) from error


def delete_if(store: Store, name: str, *, over: Seen) -> None:
    """Remove a small file; one that is gone is no error.

    Args:
        over: what is to be removed. A version "" of a remote store, and `single_writer`, are no
            condition.

    Raises:
        ConflictError: something else is there by now.
    """
    url = store.url(name)
    try:
        if store.remote:
            version = "" if store.single_writer else over.version
            store.bucket.delete(store.key(name), etag=version)
            return
        with io_errors(url, writing=True), contextlib.suppress(FileNotFoundError):
            remove_seen(url, over.data)
    except FileExistsError as error:
        raise ConflictError("another process has written this file", where=url) from error


def write_in_place(path: str, data: bytes, before: bytes | None) -> None:
    """Write a few bytes by one call and without waiting for the disk.

    Args:
        data: as many as `before`.
        before: what the file holds now; None makes the file, which must not be there.

    Raises:
        FileExistsError: it holds something else, or is there. One that was removed and made again
            in between is not written: reading and writing are through one handle.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL if before is None else os.O_RDWR
    handle = os.open(path, flags, 0o666)
    try:
        if before is not None and os.pread(handle, len(before) + 1, 0) != before:
            raise FileExistsError(path)
        os.pwrite(handle, data, 0)
    except OSError:
        if before is None:
            os.unlink(path)
        raise
    finally:
        os.close(handle)


def remove_seen(path: str, before: bytes) -> None:
    """Remove a small file, if it still is what was seen.

    Whoever removes it holds a lock on the file itself, not on its name: what lies at the name when
    that has been compared lies there until it is removed here. Where locks do nothing, the time
    between comparing and removing is open, as it would be without them.

    Args:
        before: its first bytes; none: it is empty.

    Raises:
        FileExistsError: something else is there, or another process is removing it.
        FileNotFoundError: it is gone.
    """
    handle = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(path) from None
        except OSError:  # a file system without locks
            pass
        held = os.pread(handle, len(before) + 1, 0)[: max(1, len(before))]
        if held != before or not os.path.samestat(os.stat(path), os.fstat(handle)):
            raise FileExistsError(path)
        os.unlink(path)
    finally:
        os.close(handle)


TAKEOVER_SECONDS = 60.0
"""A lease that has not changed for so long is taken over, unless its holder says otherwise."""
SHORTEST_TAKEOVER, LONGEST_TAKEOVER = 1.0, 3600.0
BEATS = 6
"""Signs of life within the take-over time."""
BYTES = 1024
"""Size of a lease, so that it is written anew in place by one write."""


class LeaseLostError(ConflictError):
    """Another process has taken this place over; nothing more may be written there: exit 7."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a lease.

    Attributes:
        fence: its number.
        id: random, of one holder.
        host, machine, pid, started: the holder, see `process.Process`.
        job, attempt: the batch job it runs in ("" for none), and how often that was started before.
        time: seconds since 1970 by the holder's clock, for people.
        clock: the holder's monotonic clock, one for all processes of a machine.
        beat: counts the signs of life.
        takeover: seconds without a change after which it may be taken over.
        released: given back.
    """

    fence: int
    id: str
    host: str
    machine: str
    pid: int
    started: int
    job: str
    attempt: int
    time: float
    clock: float
    beat: int
    takeover: float
    released: bool = False
    format: str = "olm-lease"
    version: int = 1

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return msgspec.json.encode(self).ljust(BYTES - 1) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Record | None:
        """Return a lease, or None of bytes that are none."""
        try:
            found = decode_typed(data, cls)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        known = found.format == "olm-lease" and found.version == 1
        return found if known and SHORTEST_TAKEOVER <= found.takeover <= LONGEST_TAKEOVER else None

    @property
    def process(self) -> Process:
        """The holder."""
        return Process(self.host, self.machine, self.pid, self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {printable(self.host[:100])} holds lease {self.fence}"


@dataclass(frozen=True)
class Fence:
    """What a lease is recognised by; any process of the holder's run may ask it.

    Attributes:
        store: the folder.
        prefix: start of the names of its leases.
        number: of the lease.
        id: of its holder.
    """

    store: Store
    prefix: str
    number: int
    id: str

    @property
    def name(self) -> str:
        """Name of the lease."""
        return _name(self.prefix, self.number)

    def check(self) -> None:
        """Make sure that this is still the lease that holds.

        Raises:
            LeaseLostError: it was taken over.
            StorageError: the store does not answer.
        """
        self.look()

    def look(self) -> Seen:
        """Return the lease as it is, if it holds, as `check`; one read and one listing."""
        # first: NFS asks the server for what it opens
        seen = read_versioned(self.store, self.name, BYTES)
        mine = Record.decode(seen.data) if seen is not None else None
        newest = max(_numbers(self.store, self.prefix), default=0)
        if seen is not None and mine is not None and mine.id == self.id and newest <= self.number:
            return seen
        other = _read(self.store, _name(self.prefix, newest)) if newest else None
        raise LeaseLostError(
            f"another process has taken over, so this one (lease {self.number}) stops",
            where=self.store.root,
            why=str(other) if other and newest > self.number else f"{self.name} is not ours now",
            fix="leave the place to the other one",
        )


class Lease:
    """A lease that this process holds; made by `acquire`.

    Args:
        fence: its number and holder.
        record: its content.
        note: where to say, once, that it cannot be kept fresh.

    Attributes:
        lost: why it is not ours any more, once that is known.
    """

    def __init__(self, fence: Fence, record: Record, note: Callable[[str], None]) -> None:
        self.fence, self._record, self._note = fence, record, note
        self.lost: LeaseLostError | None = None
        self._conditions = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Make sure that this lease still holds: before every act that others can see.

        Raises:
            LeaseLostError: it was taken over.
            StorageError: the store does not answer.
        """
        self._look()

    def release(self, *, keep: bool) -> None:
        """Give it back, if it is still ours.

        Args:
            keep: the file stays, given back, so that numbers go on; else it is removed.
        """
        self._stop.set()
        self._thread.join(timeout=BEATS)  # one that waits for a dead store is left alone
        if self.lost is not None:
            return
        try:
            if not keep:
                seen = self._look()
                with contextlib.suppress(OlmError):  # whoever may not delete can still write
                    delete_if(self.fence.store, self.fence.name, over=seen)
                    return
            self._renew(released=True)
        except LeaseLostError:
            return
        except (OlmError, OSError) as error:
            takeover = self._record.takeover
            self._note(f"warning: the lease stays, a restart waits up to {takeover:g} s: {error}")

    def _beat_on(self) -> None:
        failed = False
        while not self._stop.wait(self._record.takeover / BEATS):
            try:
                self._renew()
                failed = False
            except LeaseLostError:
                return
            except (OlmError, OSError) as error:  # without a rival nothing is lost
                if not failed and not self._stop.is_set():
                    self._note(f"warning: the lease cannot be kept fresh: {error}")
                failed = True

    def _look(self) -> Seen:
        if self.lost is not None:
            raise self.lost
        try:
            return self.fence.look()
        except LeaseLostError as error:
            self.lost = error
            raise

    def _renew(self, *, released: bool = False) -> None:
        """Write the lease over what is there, if that is ours.

        Raises:
            LeaseLostError, StorageError: see `check`.
            ConflictError: it is ours, and cannot be written as what it was seen to be.
        """
        for again in (True, True, False):
            seen = self._look()
            if self._stop.is_set() and not released:
                return  # else what `release` wrote before this look would be taken back
            self._record = msgspec.structs.replace(
                self._record,
                beat=self._record.beat + 1,
                time=time.time(),
                clock=time.monotonic(),
                released=released,
            )
            over = seen if self._conditions else seen._replace(version="")
            try:
                put_if(self.fence.store, self.fence.name, self._record.encode(), over=over)
                return
            except RemoteFailure as failure:
                if failure.status != 501 or not self._conditions:
                    raise
                self._conditions = False
                self._note(
                    "warning: this store refuses If-Match: a run that wakes up after it was taken "
                    "over may write its lease once more"
                )
            except ConflictError:  # changed since: by another thread of ours, or it is lost
                if not again:
                    raise


def acquire(
    store: Store,
    *,
    prefix: str,
    busy: str,
    fix: str,
    note: Callable[[str], None] = lambda text: None,
    takeover: float = TAKEOVER_SECONDS,
) -> Lease:
    """Take the lease of a folder; wait for one whose holder shows no sign of life.

    Args:
        store: the folder; it is made if it is not there.
        prefix: start of the names of its leases.
        busy, fix: what to say where another process holds it.
        note: told of a wait, and where the lease cannot be kept fresh.
        takeover: seconds without a sign of life after which others may take over from this one.

    Raises:
        ConflictError: another process holds it, and lives.
        ResourceError, StorageError: it cannot be written.
    """
    place = Store(store.root, single_writer=store.single_writer)
    if place.remote:
        place.bucket.hasty = True
    else:
        with io_errors(place.root, writing=True):
            make_folder(place.root)
    mine, (job, attempt) = this_process(), batch_job()
    id, watch = uuid.uuid4().hex, _Watch(takeover, job, attempt)
    while True:
        number = max(_numbers(place, prefix), default=0)
        last = read_versioned(place, _name(prefix, number), BYTES) if number else None
        wait = watch.wait(number, last) if number else 0.0
        if wait is None:
            raise ConflictError(busy, where=store.root, why=watch.holder, fix=fix)
        if wait > 0:
            if watch.first:
                note(f"waiting up to {wait:.0f} s in {place.root}: {watch.holder}")
            threading.Event().wait(min(wait, takeover / 30, 1.0))
            continue
        record = Record(
            fence=number + 1,
            id=id,
            **mine._asdict(),
            job=job,
            attempt=attempt,
            time=time.time(),
            clock=time.monotonic(),
            beat=0,
            takeover=takeover,
        )
        fence = Fence(place, prefix, number + 1, id)
        try:
            put_if(place, fence.name, record.encode(), over=None)
        except ConflictError:  # somebody was faster, or what is there is no file
            watch.missed(fence.number)
            continue
        for older in _numbers(place, prefix):
            if older < fence.number:  # its holder finds it gone
                with contextlib.suppress(OlmError):  # or finds the higher one
                    if seen := read_versioned(place, _name(prefix, older), BYTES):
                        fence.check()  # once all are gone, numbers begin again: this one is older
                        delete_if(place, _name(prefix, older), over=seen)
        return Lease(fence, record, note)


def newest(store: Store, prefix: str) -> Record | None:
    """Return the lease that holds, or was the last one to, for those who only look; None without.

    Raises:
        StorageError: the store does not answer.
    """
    number = max(_numbers(store, prefix), default=0)
    return _read(store, _name(prefix, number)) if number else None


class _Watch:
    """How long this process has watched the newest lease not change.

    Args:
        takeover: seconds, for a lease that does not say.
        job, attempt: of this process, as in `Record`.
    """

    def __init__(self, takeover: float, job: str, attempt: int) -> None:
        self._takeover, self._job, self._attempt = takeover, job, attempt
        self._seen: tuple[int, bytes | None] | None = None
        self._since = 0.0
        self._missed = 0
        self.first = True
        self.holder = ""

    def wait(self, number: int, found: Seen | None) -> float | None:
        """Return the seconds after which the lease may be taken over, 0 now, None never."""
        data = found.data if found is not None else None
        record = Record.decode(data) if data is not None else None
        self.holder = str(record) if record else f"lease {number} cannot be read"
        state = ProcessState.elsewhere if record is None else state_of(record.process)
        if record is not None:
            again = record.job == self._job != "" and record.attempt < self._attempt
            if record.released or state is ProcessState.dead or again:
                return 0.0
        now, takeover = time.monotonic(), record.takeover if record else self._takeover
        self.first = self._seen is None
        if not self.first and self._seen != (number, data):
            return None  # a sign of life, or somebody else was faster
        if self.first:
            self._seen, self._since = (number, data), now
            if record is not None and state is not ProcessState.elsewhere:  # one clock for both
                age = max(0.0, now - record.clock)
                if state is ProcessState.running and age < 2 * takeover / BEATS:
                    return None
                self._since = now - age
        return max(0.0, self._since + takeover - now)

    def missed(self, number: int) -> None:
        """Note that a lease could not be made although it was not listed.

        Raises:
            ConflictError: again and again; what lies there is no lease.
        """
        self._missed += 1
        if self._missed > 100:
            raise ConflictError(
                f"lease {number} is there and cannot be read", fix="remove what lies there"
            )
        threading.Event().wait(self._takeover / 100)


def _name(prefix: str, number: int) -> str:
    return f"{prefix}{number:06d}.json"


def _numbers(store: Store, prefix: str) -> list[int]:
    pattern = re.compile(re.escape(prefix) + r"(\d{6,15})\.json")
    return [int(found[1]) for name in store.sizes(prefix) if (found := pattern.fullmatch(name))]


def _read(store: Store, name: str) -> Record | None:
    seen = read_versioned(store, name, BYTES)
    return None if seen is None else Record.decode(seen.data)
