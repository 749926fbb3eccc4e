"""`olm-data doctor --clean`: what killed runs left behind, never a byte of a dataset.

    output -> staging, probes, leases, heartbeats, unfinished uploads  } older than an age
    this machine's TMPDIR -> folders of dead writers                   } -> list -> delete

Only names that this program gives, only below the output's own prefix, only what is older than the
age by the clock of the store itself.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from olm_data.counts import counted, duration
from olm_data.dataset.manifest import PLAN
from olm_data.errors import InputError, UsageError
from olm_data.path_kinds import require
from olm_data.runners.fork_server import abandoned_sockets
from olm_data.runners.heartbeat import RUN
from olm_data.storage.disk import BESIDE, abandoned
from olm_data.storage.exclusive import HIDDEN_PREFIX, PROBE
from olm_data.storage.lease import LONGEST_TAKEOVER
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import STAGING_PREFIX, WORKER_PREFIX, Store

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
# What `Store.publish` uploads in parts: files of a shard. Heartbeats and probes are small.
_STAGING = re.compile(
    rf"({re.escape(STAGING_PREFIX)}|{re.escape(WORKER_PREFIX)}[^/]+~|{re.escape(BESIDE)}[^/]+-)"
    r"[a-z0-9_]{8}"
)
_LEASE = re.compile(rf"{re.escape(HIDDEN_PREFIX)}\d{{6,15}}\.json")
_PROBE = re.compile(rf"{re.escape(PROBE)}[0-9a-f]{{32}}")
_OUR_FILE = re.compile(r"(\A|/)(shard-[^/]+|\.olm-probe-[^/]+)\Z")


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to delete.

    Attributes:
        kind: staging, probe, lease, heartbeat, upload or scratch.
        name: path or URL.
        bytes: its size; 0 for an upload, whose parts are not counted by the store.
        seconds: how long nobody has touched it; None where its writer is known to be dead.
    """

    kind: str
    name: str
    bytes: int
    seconds: float | None


class Cleaned(msgspec.Struct, frozen=True):
    """What was found below a place; `deleted` is false of a dry run."""

    place: str
    deleted: bool
    found: list[Leftover]

    def lines(self) -> list[str]:
        """Return for people what was, or would be, deleted."""
        size = sum(item.bytes for item in self.found)
        verdict = "deleted" if self.deleted else "would delete"
        return [
            *(
                f"{verdict} {item.kind} {item.name} ({item.bytes:,} bytes, {_age(item)})"
                for item in self.found
            ),
            f"{verdict} {counted(len(self.found), 'thing')}, {size:,} bytes, below {self.place}",
        ]


def _age(item: Leftover) -> str:
    return "its writer is dead" if item.seconds is None else f"{duration(item.seconds)} old"


Deletable = tuple[Leftover, Callable[[], object]]
"""A leftover, and what deletes it."""


def parse_age(text: str) -> float:
    """Return the seconds that `1d`, `12h`, `30m` or `0s` spells.

    Raises:
        UsageError: it spells none.
    """
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if not found:
        raise UsageError(f"--older-than {text!r} is not an age", fix="write 1d, 12h, 30m or 0s")
    return float(found[1]) * _UNITS[found[2]]


def clean(place: str, older_than: float, *, dry_run: bool = False) -> Cleaned:
    """Delete what killed runs left in an output, and in this machine's temporary folder.

    What is gone meanwhile, or in use again, is left alone.

    Args:
        place: folder or `s3://bucket/prefix` of a dataset.
        older_than: least age in seconds.
        dry_run: only find it.

    Raises:
        InputError: there is no such folder.
        UsageError: it is the root or the home folder.
        StorageError: the store fails.
    """
    refuse_output(place)
    store = Store(place)
    if store.remote:
        found = [*_remote(store), *_scratch()]
    elif os.path.isdir(store.root):
        found = [*_local(store), *_scratch()]
    else:
        require(place, "folder")
        raise InputError("there is no such folder", where=place)
    least = {"lease": max(older_than, LONGEST_TAKEOVER)}  # a living one is younger
    old = [
        (item, delete)
        for item, delete in found
        if item.seconds is None or item.seconds >= least.get(item.kind, older_than)
    ]
    if not dry_run:
        for _, delete in old:
            delete()
    return Cleaned(place, not dry_run, sorted((item for item, _ in old), key=lambda x: x.name))


def _remote(store: Store) -> Iterator[Deletable]:
    now = store.bucket.now().timestamp()
    entries = store.entries()
    names = {entry.name for entry in entries}
    for entry in entries:
        kind = _kind(entry.name, lambda name: name in names)
        if kind:
            age, name = now - entry.modified, store.url(entry.name)
            item = Leftover(kind=kind, name=name, bytes=entry.size, seconds=age)
            yield item, partial(store.delete, entry.name)
    for upload in store.bucket.uploads(store.key("")):
        if _OUR_FILE.search(upload.key):
            age, name = now - upload.started.timestamp(), store.bucket.url(upload.key)
            item = Leftover(kind="upload", name=name, bytes=0, seconds=age)
            yield item, partial(store.bucket.abort, upload)


def _local(store: Store) -> Iterator[Deletable]:
    now, root = time.time(), Path(store.root)
    for place, folders, names in os.walk(root):
        for folder in filter(_STAGING.fullmatch, list(folders)):
            folders.remove(folder)
            path = Path(place, folder)
            size, last = _size_and_age(path)
            item = Leftover(kind="staging", name=str(path), bytes=size, seconds=now - last)
            yield item, partial(shutil.rmtree, path, ignore_errors=True)
        for file in names:
            path = Path(place, file)
            name = str(path.relative_to(root))
            kind = _kind(name, lambda name: (root / name).is_file())
            if kind:
                stat = path.lstat()
                age = now - stat.st_mtime
                item = Leftover(kind=kind, name=str(path), bytes=stat.st_size, seconds=age)
                yield item, partial(store.delete, name)


def _scratch() -> Iterator[Deletable]:
    """Folders whose writers are dead. Where a lock of the kernel tells, age does not matter."""
    for path in abandoned():
        size, _ = _size_and_age(path)
        item = Leftover(kind="scratch", name=str(path), bytes=size, seconds=None)
        yield item, partial(abandoned, remove=True)
    for path in abandoned_sockets():
        size, last = _size_and_age(path)
        item = Leftover(kind="scratch", name=str(path), bytes=size, seconds=time.time() - last)
        yield item, partial(shutil.rmtree, path, ignore_errors=True)


def _kind(name: str, there: Callable[[str], bool]) -> str | None:
    """Return what kind of leftover a file's name says it may be.

    Args:
        there: whether a file is in the place; heartbeats lie beside a plan.
    """
    folder, _, base = name.rpartition("/")
    if _PROBE.fullmatch(base):
        return "probe"
    if _LEASE.fullmatch(base):
        return "lease"
    above, _, last = folder.rpartition("/")
    plan = f"{above}/{PLAN}" if above else PLAN
    if last == RUN and base.endswith(".json") and there(plan):
        return "heartbeat"
    return None


def _size_and_age(path: Path) -> tuple[int, float]:
    """Return the bytes below a folder and when something in it was last written."""
    size, last = 0, path.lstat().st_mtime
    for file in path.rglob("*"):
        stat = file.lstat()
        size, last = size + stat.st_size, max(last, stat.st_mtime)
    return size, last
