"""Input files on remote storage: listing, and reading with exactly the version that was listed.

    s3://bucket/key | folder | pattern -> listed -> (URL, bytes, revision), ...
    (URL, revision) -> RemoteFile: ranged reads of one ETag, the next block fetched meanwhile

Every read is conditional on the ETag, so that an object replaced in the middle of a run is an error
and never a mixture of two versions.
"""

from __future__ import annotations

import glob
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from olm_data.errors import InputError
from olm_data.storage.bucket import open_bucket
from olm_data.storage.objects import Object, RemoteFailure
from olm_data.storage.service import Seekable

BLOCK = 8 << 20  # bytes fetched at a time; two blocks are in memory


class Listed(NamedTuple):
    """One object: its URL, size, and ETag-size."""

    url: str
    bytes: int
    revision: str


def listed(url: str) -> list[Listed]:
    """Return the object of a URL, or those below a folder or that match a pattern, by key.

    Raises:
        StorageError: the store fails.
    """
    bucket, key = open_bucket(url, hasty=True)
    if glob.has_magic(key):
        from fsspec.utils import glob_translate  # slow to import

        literal = re.split(r"[*?\[]", key)[0]
        pattern = re.compile(glob_translate(key))
        found = [item for item in bucket.list(literal) if pattern.match(item.key)]
    else:
        one = bucket.head(key) if key else None
        found = [one] if one else list(bucket.list(f"{key}/" if key else ""))
    files = [item for item in found if not item.key.endswith("/")]  # no markers of empty folders
    return [Listed(bucket.url(item.key), item.size, _revision(item)) for item in files]


def current(url: str) -> str:
    """Return the revision of an object now, "" where it is gone."""
    bucket, key = open_bucket(url)
    found = bucket.head(key)
    return "" if found is None else _revision(found)


def _revision(item: Object) -> str:
    return f"{item.etag}-{item.size}"


def changed_input(path: str) -> InputError:
    """Return the error of an input that is not the file that was listed."""
    return InputError(
        "an input changed while it was being read",
        where=path,
        why="its shard would mix two versions of the file",
        fix="once the file no longer changes, delete the output and run the command again",
    )


class RemoteFile(Seekable):
    """One version of an object as a seekable file.

    Args:
        url, size, revision: as listed.
        path: what to call it in messages.
        ahead: fetch whole blocks, and the next one in the background; False for a reader that asks
            for exact ranges itself.
    """

    def __init__(self, url: str, size: int, revision: str, path: str, *, ahead: bool) -> None:
        super().__init__(size)
        self._bucket, self._key = open_bucket(url)
        self._path = path
        self._etag = revision.rpartition("-")[0]
        self._pool = ThreadPoolExecutor(1) if ahead else None
        self._block: tuple[int, bytes] = (-1, b"")
        self._next: tuple[int, Future[bytes]] | None = None

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes; fewer only at a block's or the file's end."""
        stop = self._size if size is None or size < 0 else min(self._size, self._at + size)
        if stop <= self._at:
            return b""
        if self._pool is None:
            data = self._fetch(self._at, stop)
        elif size is None or size < 0:
            data = b"".join(iter(lambda: self.read(BLOCK), b""))
            stop = self._at
        else:
            number = self._at // BLOCK
            block = self._load(number)
            start = self._at - number * BLOCK
            data = block[start : start + stop - self._at]
            stop = self._at + len(data)
        self._at = stop
        return data

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _load(self, number: int) -> bytes:
        """Return block `number`; the one after it is on its way when this returns."""
        assert self._pool is not None
        if self._block[0] != number:
            if self._next is not None and self._next[0] == number:
                data = self._next[1].result()
            else:
                data = self._fetch_block(number)
            self._block, self._next = (number, data), None
            if (number + 1) * BLOCK < self._size:
                self._next = (number + 1, self._pool.submit(self._fetch_block, number + 1))
        return self._block[1]

    def _fetch_block(self, number: int) -> bytes:
        return self._fetch(number * BLOCK, min(self._size, (number + 1) * BLOCK))

    def _fetch(self, start: int, stop: int) -> bytes:
        try:
            return self._bucket.get(self._key, start, stop, etag=self._etag)
        except (FileNotFoundError, RemoteFailure) as error:
            if isinstance(error, RemoteFailure) and not error.is_other_version:
                raise
            raise changed_input(self._path) from error
