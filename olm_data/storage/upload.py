"""A local file as an object: whole, or in parts where it is large; what arrived is what was sent.

    upload -> small:  one request
           -> large:  begin -> parts, each tried again alone -> complete
                      an error -> abort: no part stays behind

A completion whose answer was lost may have been done: the object is looked at before it is called a
failure.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from olm_data.errors import StorageError
from olm_data.storage import bucket as bounds
from olm_data.storage.bucket import PIECE, Bucket
from olm_data.storage.objects import RemoteFailure, Upload, conflict, other_bytes
from olm_data.storage.service import FileSlice, SentPart, Service

WITHIN = 6 * 3600.0
"""Seconds after which no attempt to send a whole file starts."""
SMALLEST_PART, MOST_PARTS = 16 << 20, 9000
_UNIT = 1 << 20  # Google takes multiples of 256 KiB

_log = logging.getLogger(__name__)


def upload(bucket: Bucket, key: str, path: Path, sha256: str, *, in_parts: bool = False) -> None:
    """Write a local file as an object, in parts if it is large, and check what arrived.

    Args:
        bucket, key: the object.
        path: the file.
        sha256: digest of the file.
        in_parts: even if it is small.

    Raises:
        ConflictError: another process has written other bytes there since this upload began, where
            the store tells (Google, of large files).
        RemoteFailure: nothing new is visible then, and no part is left behind.
    """
    size = path.stat().st_size
    if in_parts or (bucket.service.parts_at_a_time and size >= 2 * part_size(size)):
        proved = _in_parts(bucket, key, path, size, sha256)
    else:
        within = None if bucket.hasty else replace(bounds.BACKOFF, within=WITHIN)
        proved, _ = bucket.ask(
            "put_object", key, lambda here: here.put_file(bucket.name, key, path), backoff=within
        )
    if not proved and not _reads_back(bucket, key, size, sha256):
        bucket.delete(key)
        raise other_bytes(bucket.url(key))


def part_size(size: int) -> int:
    """Return the part size for an object of `size` bytes: at most 9,000 of the 10,000 parts."""
    return max(SMALLEST_PART, -(-size // MOST_PARTS // _UNIT) * _UNIT)


def _in_parts(bucket: Bucket, key: str, path: Path, size: int, sha256: str) -> bool:
    """Upload a file in parts. Returns whether all of it is proved to have arrived."""
    at_a_time = bucket.service.parts_at_a_time
    part = part_size(size) * (2 if at_a_time == 1 else 1)
    begun, stopped = bucket.begin(key, path), threading.Event()
    handle = os.open(path, os.O_RDONLY)

    def send(number: int) -> SentPart:
        start = (number - 1) * part
        stop = min(size, start + part)

        def once(here: Service) -> SentPart:
            return here.send(begun, bucket.name, number, FileSlice(handle, start, stop))

        return bucket.ask("upload_part", key, once, stopped=stopped)[0]

    numbers = range(1, max(1, -(-size // part)) + 1)
    try:
        sent = (
            [send(n) for n in numbers]
            if at_a_time == 1
            else _beside(send, numbers, at_a_time, stopped)
        )
        return _complete(bucket, begun, sent, size, sha256)
    except BaseException as error:
        _abort_quietly(bucket, begun)
        if not (isinstance(error, RemoteFailure) and error.is_other_version):
            raise
        if _reads_back(bucket, key, size, sha256):  # another process has written the same
            return True
        what = "another process has written this file in the meantime"
        raise conflict(what, bucket.url(key)) from error
    finally:
        os.close(handle)


def _beside(
    send: Callable[[int], SentPart], numbers: range, at_a_time: int, stopped: threading.Event
) -> list[SentPart]:
    """Send parts, several at a time; after an error no further one begins."""
    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            return list(pool.map(send, numbers))
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _complete(bucket: Bucket, begun: Upload, sent: list[SentPart], size: int, sha256: str) -> bool:
    told = [part.told for part in sent]
    try:
        bucket.ask(
            "complete_multipart_upload",
            begun.key,
            lambda here: here.complete(begun, bucket.name, told),
        )
    except RemoteFailure as failure:
        # Its answer may have been lost: then the upload is gone and the object is there.
        lost = failure.code == "NoSuchUpload" and failure.attempts > 1
        if not lost or not _reads_back(bucket, begun.key, size, sha256):
            raise
    return all(part.proved for part in sent)


def _abort_quietly(bucket: Bucket, begun: Upload) -> None:
    try:
        bucket.abort(begun)
    except StorageError as error:  # the first error is the one to hear of
        where = bucket.url(begun.key)
        _log.warning("%s: an unfinished upload stays behind: %s", where, error.what)


def _reads_back(bucket: Bucket, key: str, size: int, sha256: str) -> bool:
    """Whether the object has this digest; for stores whose answer proves nothing."""
    found = bucket.head(key)
    if found is None or found.size != size:
        return False
    seen = hashlib.sha256()
    for start in range(0, size, PIECE):
        seen.update(bucket.get(key, start, min(size, start + PIECE), etag=found.etag))
    return seen.hexdigest() == sha256
