"""One writer at a time in a folder, local or remote, on one machine or many, asleep or awake.

    acquire -> lease-000007.json, created only where there is none; the highest number holds
            -> beat: a thread writes it anew while the holder lives
    check   -> own lease still there, and none above it? else LeaseLostError (exit 7)
    release -> given back: the next one starts at once

Needs no compare-and-swap: only a create that fails where there is something. The number is the
fence: whoever was taken over finds a higher one (or his own gone) before he publishes anything, by
`check`. A lease is taken over once it was given back, once its process is known to be dead (same
machine), by a later start of the same Slurm job, or once it has not changed for its take-over
time by the watcher's own monotonic clock; clocks of two machines are never compared.
Never: waited for by work, or trusted from a check made long ago.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from olm_data.errors import ConflictError, OlmError, printable
from olm_data.storage.disk import io_errors, make_folder
from olm_data.storage.process import Process, State, state_of, this_process
from olm_data.storage.store import Store

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
            found = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        known = found.format == "olm-lease" and found.version == 1
        bounded = SHORTEST_TAKEOVER <= found.takeover <= LONGEST_TAKEOVER
        return found if known and bounded else None

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
        """Make sure that this is still the lease that holds; one read and one listing.

        Raises:
            LeaseLostError: it was taken over.
            StorageError: the store does not answer.
        """
        mine = _read(self.store, self.name)  # first: NFS asks the server for what it opens
        newest = max(_numbers(self.store, self.prefix), default=0)
        if mine is not None and mine.id == self.id and newest <= self.number:
            return
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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Make sure that this lease still holds: before every act that others can see.

        Raises:
            LeaseLostError: it was taken over.
            StorageError: the store does not answer.
        """
        if self.lost is not None:
            raise self.lost
        try:
            self.fence.check()
        except LeaseLostError as error:
            self.lost = error
            raise

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
            self.check()
            if not keep:
                with contextlib.suppress(OlmError):  # whoever may not delete can still write
                    self.fence.store.delete(self.fence.name)
                    return
            self._mark(released=True)
        except LeaseLostError:
            return
        except (OlmError, OSError) as error:
            takeover = self._record.takeover
            self._note(f"warning: the lease stays, a restart waits up to {takeover:g} s: {error}")

    def _beat_on(self) -> None:
        failed = False
        while not self._stop.wait(self._record.takeover / BEATS):
            try:
                self.check()
                self._mark()
                failed = False
            except LeaseLostError:
                return
            except (OlmError, OSError) as error:  # without a rival nothing is lost
                if not failed and not self._stop.is_set():
                    self._note(f"warning: the lease cannot be kept fresh: {error}")
                failed = True

    def _mark(self, *, released: bool = False) -> None:
        self._record = msgspec.structs.replace(
            self._record,
            beat=self._record.beat + 1,
            time=time.time(),
            clock=time.monotonic(),
            released=released,
        )
        self.fence.store.mark(self.fence.name, self._record.encode())


def acquire(
    store: Store,
    *,
    prefix: str,
    busy: str,
    fix: str,
    note: Callable[[str], None],
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
    mine, (job, attempt) = this_process(), _job()
    id, watch = uuid.uuid4().hex, _Watch(takeover, job, attempt)
    while True:
        number = max(_numbers(place, prefix), default=0)
        wait = watch.wait(number, _data(place, _name(prefix, number))) if number else 0.0
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
            place.mark(fence.name, record.encode(), create=True)
        except ConflictError:  # somebody was faster, or what is there is no file
            watch.missed(fence.number)
            continue
        for older in _numbers(place, prefix):
            if older < fence.number:  # its holder finds it gone
                with contextlib.suppress(OlmError):  # or finds the higher one
                    place.delete(_name(prefix, older))
        return Lease(fence, record, note)


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

    def wait(self, number: int, data: bytes | None) -> float | None:
        """Return the seconds after which the lease may be taken over, 0 now, None never."""
        record = Record.decode(data) if data is not None else None
        self.holder = str(record) if record else f"lease {number} cannot be read"
        state = State.elsewhere if record is None else state_of(record.process)
        if record is not None:
            again = record.job == self._job != "" and record.attempt < self._attempt
            if record.released or state is State.dead or again:
                return 0.0
        now, takeover = time.monotonic(), record.takeover if record else self._takeover
        self.first = self._seen is None
        if not self.first and self._seen != (number, data):
            return None  # a sign of life, or somebody else was faster
        if self.first:
            self._seen, self._since = (number, data), now
            if record is not None and state is not State.elsewhere:  # one clock for both
                age = max(0.0, now - record.clock)
                if state is State.running and age < 2 * takeover / BEATS:
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


def _data(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name, 0, BYTES)
    except FileNotFoundError:
        return None


def _read(store: Store, name: str) -> Record | None:
    data = _data(store, name)
    return None if data is None else Record.decode(data)


def _job() -> tuple[str, int]:
    """Return the Slurm job of this process and how often Slurm has started it again."""
    number, again = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    if not number.isdecimal():
        return "", 0
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")[:64]
    return f"slurm {cluster} {number}", int(again) if again.isdecimal() else 0
