"""`olm-data doctor`: can a dataset be written here, and what is this place like? Asked by doing it.

    place -> Patient(store, probe names) -> checks in order, each writes and reads -> Finding, ...

A check that cannot go on ends the examination: what follows would only repeat it. Everything
written begins with `.olm-probe-` and is removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

import msgspec

from olm_data.dataset.manifest import PLAN
from olm_data.errors import InputError, OlmError, ResourceError, StorageError, UsageError
from olm_data.path_kinds import kind_of, require
from olm_data.printing import Seconds
from olm_data.runners.fork_server import abandoned_sockets
from olm_data.runners.heartbeat import RUN
from olm_data.storage.disk import BESIDE, abandoned, existing_parent, locked
from olm_data.storage.exclusive import (
    HIDDEN_PREFIX,
    PROBE,
    Probe,
    conditional_create,
    conditional_delete,
    conditional_replace,
)
from olm_data.storage.lease import LONGEST_TAKEOVER
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import STAGING_PREFIX, WORKER_PREFIX, Store, is_remote
from olm_data.storage.upload import upload

State = Literal["ok", "note", "fail"]
LARGE = 8 << 20  # bytes, for the throughput
LOW_ROOM = 10 << 30
MOST_SKEW, SKEW_WORTH_A_NOTE = 900, 60  # seconds; S3 refuses above the first


class PlaceFinding(msgspec.Struct, frozen=True):
    """What one check found: `fail` stops work there, `note` is good to know."""

    check: str
    state: State
    seen: str
    fix: str = ""


class PlaceReport(msgspec.Struct, frozen=True):
    """All findings about a place; `ok` where nothing failed."""

    place: str
    ok: bool
    findings: list[PlaceFinding]

    @property
    def exit_code(self) -> int:
        """6 or 5 where work would fail, else 0."""
        if self.ok:
            return 0
        return (StorageError if is_remote(self.place) else ResourceError).exit_code


def examine(place: str) -> PlaceReport:
    """Try out a folder or URL as the output of a run.

    Raises:
        UsageError: the URL holds credentials or is of an unknown kind, or no output can be there.
    """
    refuse_output(place)
    if kind_of(place) is not None and not os.path.isdir(place.removeprefix("file://")):
        require(place, "folder")
    store = Store(place)
    checks = _LOCAL
    if store.remote:
        checks = _S3 if store.bucket.scheme == "s3" else _REMOTE
    findings: list[PlaceFinding] = []
    with tempfile.TemporaryDirectory() as folder:
        if not store.remote:
            parent = str(existing_parent(store.root))
            if parent == "/":  # nothing of ours is tried out among the files of the system
                raise UsageError(
                    "the folder does not exist, nor does one above it",
                    where=place,
                    fix="make it, then run the same command again",
                )
            store = Store(parent)
        with Probe(store) as probe:
            for check in checks:
                name = (check.__doc__ or "").split(":")[0]
                try:
                    findings += [PlaceFinding(name, *rest) for rest in check(probe, Path(folder))]
                except OlmError as error:
                    why = f" ({error.why})" if error.why else ""
                    findings.append(
                        PlaceFinding(name, "fail", f"{error.what}{why}", error.fix or "")
                    )
                    break
        findings += [PlaceFinding("delete", "note", note, "") for note in probe.notes]
    return PlaceReport(place, all(found.state != "fail" for found in findings), findings)


Verdicts = Iterator[tuple[State, str] | tuple[State, str, str]]


def _write(probe: Probe, folder: Path) -> Verdicts:
    """write: a small file, whole and durable."""
    begun = perf_counter()
    probe.store.put(probe.name, b"probe")
    yield "ok", f"{1000 * (perf_counter() - begun):.1f} ms for a small file"


def _read(probe: Probe, folder: Path) -> Verdicts:
    """read: what was written, whole and in part."""
    seen = (probe.store.read(probe.name), probe.store.read(probe.name, 1, 3))
    if seen == (b"probe", b"ro"):
        yield "ok", "whole and in part"
    else:
        yield "fail", f"other bytes come back: {seen}", "do not use this store"


def _listing(probe: Probe, folder: Path) -> Verdicts:
    """list: a new file is listed at once."""
    listed = probe.name in probe.store.sizes(probe.name)
    yield ("ok", "a new file is listed at once") if listed else ("note", "a new file comes later")


def _create(probe: Probe, folder: Path) -> Verdicts:
    """conditional create: two writers at one name, one is refused."""
    probe.store.delete(probe.name)
    verdict = conditional_create(probe)
    fix = "make sure that nobody else writes there, and use tokenize --single-writer"
    yield ("ok", "a second create is refused") if verdict == "honoured" else ("fail", verdict, fix)


def _replace(probe: Probe, folder: Path) -> Verdicts:
    """conditional replace: what was replaced or removed since is not written over."""
    verdict = conditional_replace(probe)
    fix = "it is enough that two runs do not write there at a time"
    said = f"{verdict}: a run that wakes up after another took over may write its lease once more"
    yield ("ok", "an old version is refused") if verdict == "honoured" else ("note", said, fix)


def _remove(probe: Probe, folder: Path) -> Verdicts:
    """conditional delete: what was replaced since is not removed."""
    verdict = conditional_delete(probe)
    fix = "it is enough that two runs do not write there at a time"
    said = {
        "ignored": "ignored: a run that wakes up after two others may remove the lease of the last",
        "refused": "refused: leases stay, marked as given back",
    }
    if verdict == "honoured":
        yield "ok", "an old version is not removed"
    else:
        yield "note", said[verdict], fix


def _delete(probe: Probe, folder: Path) -> Verdicts:
    """delete: a deleted file is gone."""
    probe.store.delete(probe.name)
    if probe.store.exists(probe.name):
        yield "note", "a deleted file is still seen"
    else:
        yield "ok", "a deleted file is gone"


def _address(probe: Probe, folder: Path) -> Verdicts:
    """address: where requests go, and the round trip of one."""
    bucket, times = probe.store.bucket, []
    for _ in range(5):
        begun = perf_counter()
        next(bucket.list(probe.store.key(probe.name)), None)
        times.append(perf_counter() - begun)
    away = f"{1000 * statistics.median(times):.1f} ms away"
    yield "ok", f"{bucket.endpoint()}, bucket {bucket.name}, {away}"


def _clock(probe: Probe, folder: Path) -> Verdicts:
    """clock: this machine's against the store's."""
    skew = abs((datetime.now(UTC) - probe.store.bucket.now()).total_seconds())
    fix = "set this machine's clock: S3 refuses requests that are 15 minutes off"
    state: State = "ok" if skew < SKEW_WORTH_A_NOTE else "note" if skew < MOST_SKEW else "fail"
    yield state, f"{skew:.0f} s from the store's", "" if state == "ok" else fix


def _checksums(probe: Probe, folder: Path) -> Verdicts:
    """checksums: what the client sends with every write, and what proves an upload."""
    from olm_data.storage.s3 import CHECKSUM_SETTING, S3

    here = probe.store.bucket.service
    assert isinstance(here, S3)
    answer = probe.store.bucket.head(probe.store.key(probe.name))
    sent = hashlib.md5(b"probe", usedforsecurity=False).hexdigest()
    md5 = answer is not None and answer.etag == sent
    proof = "ETags are md5" if md5 else "ETags are not md5: by CRC-32, or reading back"
    if not here.sends_checksums:
        yield "note", f"not sent ({CHECKSUM_SETTING}); {proof}"
    else:
        yield "ok", f"accepted; {proof}"


def _multipart(probe: Probe, folder: Path) -> Verdicts:
    """multipart: an upload in parts is finished, and another given up without a trace."""
    bucket, key = probe.store.bucket, probe.store.key(probe.name)
    path = folder / "part"
    path.write_bytes(b"part")
    upload(bucket, key, path, hashlib.sha256(b"part").hexdigest(), in_parts=True)
    if bucket.get(key) != b"part":
        yield "fail", "a finished upload holds other bytes", "do not use this store"
    id = bucket.begin(key, path).id
    listed = [found for found in bucket.uploads(key) if found.id == id]
    for found in listed:
        bucket.abort(found)
    if not listed:
        yield (
            "note",
            "unfinished uploads are not listed",
            "set a lifecycle rule: --clean misses them",
        )
    elif any(found.id == id for found in bucket.uploads(key)):
        yield "note", "an aborted upload is still listed", "set a lifecycle rule"
    else:
        yield "ok", "finished, listed and given up"


def _throughput(probe: Probe, folder: Path) -> Verdicts:
    """throughput: one large file there and back."""
    path = folder / "large"
    path.write_bytes(os.urandom(LARGE))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    begun = perf_counter()
    probe.store.publish(probe.name, path, sha256)
    between = perf_counter()
    same = hashlib.sha256(probe.store.read(probe.name)).hexdigest() == sha256
    ended = perf_counter()
    rates = (
        f"{LARGE / 1e6 / (between - begun):.0f} MB/s up, {LARGE / 1e6 / (ended - between):.0f} down"
    )
    yield ("ok", rates) if same else ("fail", "other bytes come back", "do not use this store")


def _room(probe: Probe, folder: Path) -> Verdicts:
    """room: free bytes where unfinished shards lie."""
    place = folder if probe.store.remote else Path(probe.store.root)
    free = shutil.disk_usage(place).free
    fix = "make room, or set TMPDIR to a larger disk" if probe.store.remote else "make room"
    state: State = "note" if free < LOW_ROOM else "ok"
    yield (
        state,
        f"{free:,} bytes free in {place.parent if probe.store.remote else place}",
        (fix if state == "note" else ""),
    )


def _lock(probe: Probe, folder: Path) -> Verdicts:
    """lock: a lock that one process holds is refused to another."""
    path = Path(probe.store.url(probe.name))
    with locked(path, remove=False), locked(path, wait=False, remove=False) as second:
        if second is None:
            yield "ok", "a second one is refused"
        else:
            said = "nothing: outputs and runs are kept apart by leases; as a shard cache it is slow"
            yield "note", "locks do nothing here", said


def _files(probe: Probe, folder: Path) -> Verdicts:
    """open files: how many this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 4096
    said = "any number" if soft == resource.RLIM_INFINITY else f"{soft:,} open files"
    yield ("note", said, f"ulimit -n {hard}") if few else ("ok", said)


Check = Callable[[Probe, Path], Verdicts]
_S3: tuple[Check, ...] = (
    *(_address, _clock, _write, _checksums, _read, _listing, _create, _replace, _remove),
    *(_multipart, _throughput, _delete, _room, _files),
)
_REMOTE = tuple(check for check in _S3 if check not in (_checksums, _multipart))
_LOCAL: tuple[Check, ...] = (
    *(_write, _read, _listing, _create, _lock, _throughput, _delete, _room, _files),
)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
# What `Store.publish` uploads in parts: files of a shard. Heartbeats and probes are small.
_STAGING = re.compile(
    rf"({re.escape(STAGING_PREFIX)}|{re.escape(WORKER_PREFIX)}[^/]+~|{re.escape(BESIDE)}[^/]+-)"
    r"[a-z0-9_]{8}"
)
_LEASE = re.compile(rf"{re.escape(HIDDEN_PREFIX)}\d{{6,15}}\.json")
_PROBE = re.compile(rf"{re.escape(PROBE)}[0-9a-f]{{32}}")
_OUR_FILE = re.compile(r"(\A|/)(shard-[^/]+|\.olm-probe-[^/]+)\Z")


class Leftover(msgspec.Struct, frozen=True):
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
    seconds: Seconds | None


class Cleaned(msgspec.Struct, frozen=True):
    """What was found below a place; `deleted` is false of a dry run."""

    place: str
    deleted: bool
    found: list[Leftover]


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
            yield Leftover(kind, name, entry.size, age), partial(store.delete, entry.name)
    for begun in store.bucket.uploads(store.key("")):
        if _OUR_FILE.search(begun.key):
            age, name = now - begun.started.timestamp(), store.bucket.url(begun.key)
            yield Leftover("upload", name, 0, age), partial(store.bucket.abort, begun)


def _local(store: Store) -> Iterator[Deletable]:
    now, root = time.time(), Path(store.root)
    for place, folders, names in os.walk(root):
        for folder in filter(_STAGING.fullmatch, list(folders)):
            folders.remove(folder)
            path = Path(place, folder)
            size, last = _size_and_age(path)
            item = Leftover("staging", str(path), size, now - last)
            yield item, partial(shutil.rmtree, path, ignore_errors=True)
        for file in names:
            path = Path(place, file)
            name = str(path.relative_to(root))
            kind = _kind(name, lambda name: (root / name).is_file())
            if kind:
                stat = path.lstat()
                item = Leftover(kind, str(path), stat.st_size, now - stat.st_mtime)
                yield item, partial(store.delete, name)


def _scratch() -> Iterator[Deletable]:
    """Folders whose writers are dead. Where a lock of the kernel tells, age does not matter."""
    for path in abandoned():
        size, _ = _size_and_age(path)
        yield Leftover("scratch", str(path), size, None), partial(abandoned, remove=True)
    for path in abandoned_sockets():
        size, last = _size_and_age(path)
        item = Leftover("scratch", str(path), size, time.time() - last)
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
