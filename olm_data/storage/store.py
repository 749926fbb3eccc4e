"""A folder that outlives crashes: local directory or remote prefix, behind six operations.

A name becomes visible only when all its bytes are durable; there is no open-for-write handle,
because fsspec publishes a partial object when the body of `with fs.open(url, "wb")` raises.

    name -> checked once, by `key` -> Folder: regular files, no link out, durable writes
                                   -> Bucket: what arrived is what was sent

Also: A local folder by the operations of a bucket: the one place that mistrusts what lies on a
disk.

Also: JSON files of a store, within one limit: what is written can be read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple

from olm_data.bounded_json import gathered
from olm_data.errors import InputError, UsageError
from olm_data.regular_files import (
    MAX_DOCUMENT,
    MAX_WHOLE,
    open_regular,
    read_regular,
    refuse_large,
    refuse_link_out,
    refuse_special,
)
from olm_data.storage.bucket import PIECE, Bucket, open_bucket
from olm_data.storage.disk import fsync_path, io_errors, make_folder, scratch, write_durable
from olm_data.storage.names import refuse_escape
from olm_data.storage.objects import Object, conflict
from olm_data.storage.upload import upload


class Folder:
    """The files of a local folder.

    Args:
        root: its path.
        within: folder that no link may lead out of: `root`, or one above it.
        staging_prefix: start of the names of folders for unfinished files.

    Raises:
        FileNotFoundError: of each operation that reads, where there is no such file.
        ValidationError: of these, where it is no regular file, or a link out of `within`.
        ResourceError: what the system refuses.
    """

    def __init__(self, root: str, within: str, staging_prefix: str) -> None:
        self.root, self._within, self._staging_prefix = root, within, staging_prefix

    def url(self, name: str) -> str:
        """Return the path of a file."""
        return f"{self.root}/{name}"

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading."""
        with io_errors(self.url(name)) as path:
            return open_regular(path, within=self._within)

    def get(
        self, name: str, start: int = 0, stop: int | None = None, *, most: int | None = None
    ) -> bytes:
        """Return bytes [start, stop) of a file, as many of them as it has; all: at most `most`."""
        with io_errors(self.url(name)) as path:
            if stop is None:
                return read_regular(path, most or MAX_WHOLE, within=self._within)[start:]
            with open_regular(path, within=self._within) as file:
                file.seek(start)
                there = os.fstat(file.fileno()).st_size  # for a buffer no larger than the file
                return file.read(max(0, min(stop, there) - start))

    def pieces(self, name: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a file from `start` on in pieces of `size`."""
        with io_errors(self.url(name)), self.open(name) as file:
            file.seek(start)
            while piece := file.read(size):
                yield piece

    def head(self, name: str) -> Object | None:
        """Return what is known of a file, None where there is none."""
        with io_errors(self.url(name)) as path:
            try:
                there = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            refuse_special(there.st_mode, path)
            refuse_link_out(path, self._within)
            return _object(name, there)

    def list(self, below: str = "") -> Iterator[Object]:
        """Yield the files below a sub-folder, `folder/`, or all; of a link what it is itself."""
        with io_errors(self.url(below)) as folder:
            for place, _, names in os.walk(folder):
                for path in (Path(place, name) for name in names):
                    with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                        yield _object(str(path.relative_to(self.root)), path.lstat())

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes of the files right in the folder whose names start with `prefix`."""
        found = {}
        with (
            io_errors(self.root),
            contextlib.suppress(FileNotFoundError),
            os.scandir(self.root) as entries,
        ):
            for entry in entries:
                if entry.name.startswith(prefix) and entry.is_file():
                    with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                        found[entry.name] = entry.stat().st_size
        return found

    def delete(self, name: str) -> None:
        """Delete a file; one that is not there is no error."""
        with io_errors(self.url(name), writing=True), contextlib.suppress(FileNotFoundError):
            os.unlink(self.url(name))

    def put(self, name: str, data: bytes, *, create: bool = False) -> None:
        """Write a file whole and durable; `create`: only where there is none, else FileExistsError.

        Raises:
            FileExistsError: there is one.
        """
        with io_errors(self.url(name), writing=True), self.staging() as staging:
            made = staging / ("create" if create else "put")
            write_durable(made, data)
            if create:
                os.link(made, self.url(name))
                fsync_path(Path(self.root))
            else:
                self.publish(name, made)

    def publish(self, name: str, path: Path) -> None:
        """Make a finished, fsynced file of the same file system visible as `name`."""
        with io_errors(self.url(name), writing=True) as url:
            folder = os.path.dirname(url)
            if not os.path.isdir(folder):  # the first file of a sub-folder
                make_folder(folder)
                fsync_path(Path(folder).parent)
            os.replace(path, url)
            fsync_path(Path(folder))

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a folder for unfinished files; it is removed at the end, whatever happens."""
        with io_errors(self.root, writing=True):
            make_folder(self.root)
            folder = Path(tempfile.mkdtemp(prefix=self._staging_prefix, dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _object(name: str, found: os.stat_result) -> Object:
    return Object(name, found.st_size, "", datetime.fromtimestamp(found.st_mtime, UTC))


STAGING_PREFIX = ".staging-"
WORKER_PREFIX = ".worker-"
"""Staging folders of workers that an earlier parent may have left at work: kept by `exclusive`
until its end."""
_HASHED = 4 << 20  # bytes

_log = logging.getLogger(__name__)


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether `url` names remote storage (`s3://...`, `gs://...`) rather than a local path."""
    text = os.fspath(url)
    return "://" in text and not text.startswith("file://")


def refuse_no_place(name: str) -> None:
    """Refuse a local folder's name that is empty, or is the root of the file system.

    Raises:
        UsageError: it is.
    """
    if not name.strip():
        raise UsageError(
            "the name of the folder is empty",
            why="an empty name would mean the root of the file system",
            fix="is a shell variable unset? name a folder, or s3://BUCKET/PREFIX",
        )
    local = name.removeprefix("file://")
    if "://" not in local and os.path.normpath(local).strip("/") == "":
        raise UsageError(
            "the root of the file system cannot be used as a folder of data",
            where=name,
            fix="name a folder of its own, or s3://BUCKET/PREFIX",
        )


def absolute(url: str) -> str:
    """Return `url` as processes in other folders and on other machines name it."""
    return url if is_remote(url) else os.path.abspath(url.removeprefix("file://"))


class Entry(NamedTuple):
    """A file in a store: name from its root, size in bytes, time it was written (Unix seconds)."""

    name: str
    size: int
    modified: float


class Store:
    """A dataset's folder.

    Args:
        root: local path or URL, as `s3://bucket/prefix`; it is created by the first write.
        single_writer: nobody else writes here, so `create` may look first and then write: for a
            store that does not honour conditional writes.
        staging_prefix: start of the names of local folders for unfinished files.
        within: folder that no link may lead out of, where it is one above `root`.

    Raises:
        UsageError: the URL is of another kind of storage, or holds credentials; the name is empty
            or is the root of the file system.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        single_writer: bool = False,
        staging_prefix: str = STAGING_PREFIX,
        within: str | None = None,
    ) -> None:
        text = os.fspath(root)
        refuse_no_place(text)
        self.staging_prefix = staging_prefix
        self.root = text.removeprefix("file://").rstrip("/")
        self.remote = is_remote(text)
        self.single_writer = single_writer
        self._within = within or self.root
        self._like = partial(
            Store, single_writer=single_writer, staging_prefix=staging_prefix, within=self._within
        )
        self._files: Bucket | Folder
        if self.remote:
            self.bucket, self._prefix = open_bucket(text)
            self._files = self.bucket
        else:
            self._files = self._folder = Folder(self.root, self._within, staging_prefix)
            self._prefix = ""

    def __reduce__(self) -> tuple[Callable[[str], Store], tuple[str]]:
        return self._like, (self.root,)

    def __repr__(self) -> str:
        return f"Store({self.root!r})"

    def url(self, name: str) -> str:
        """Return the path or URL of `name`.

        Raises:
            ValidationError: the name leads out of this folder.
        """
        refuse_escape(name)
        return f"{self.root}/{name}"

    def key(self, name: str) -> str:
        """Return the key of `name` in the bucket of a remote store, the name itself in a folder.

        Raises:
            ValidationError: the name leads out of this folder.
        """
        refuse_escape(name)
        return f"{self._prefix}/{name}" if self._prefix else name

    def child(self, name: str) -> Store:
        """Return the store of a sub-folder."""
        return self._like(self.url(name))

    def open(self, name: str) -> IO[bytes]:
        """Open a file of a local folder for reading.

        Raises:
            FileNotFoundError: there is no such file.
            ValidationError: it is no regular file, or a link out of the folder.
        """
        return self._folder.open(self.key(name))

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, limit: int = MAX_WHOLE
    ) -> bytes:
        """Return bytes [start, stop) of `name`, all of them by default.

        Args:
            limit: bytes it may have at most where all of them are read.

        Raises:
            FileNotFoundError: there is no such file.
            ValidationError: it is no regular file, a link out of the folder, or too large.
        """
        key = self.key(name)
        _log.debug("read %s/%s", self.root, name)
        return self._files.get(key, start, stop, most=limit if stop is None else None)

    def pieces(self, name: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of `name` from `start` on in pieces of `size`.

        Raises:
            FileNotFoundError: there is no such file.
            ValidationError: it is no regular file, or a link out of the folder.
        """
        return self._files.pieces(self.key(name), size, start)

    def download(
        self, name: str, path: Path, *, stopped: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Copy a file to `path`; return the sha256 of what came, None once `stopped` says so.

        Raises:
            FileNotFoundError: there is no such file.
        """
        seen = hashlib.sha256()
        with open(path, "wb") as file:
            for piece in self.pieces(name, PIECE):
                if stopped():
                    return None
                seen.update(piece)
                with io_errors(str(path), writing=True):
                    file.write(piece)
        return seen.hexdigest()

    def sha256(self, name: str) -> str:
        """Return the sha256 of `name`, read a piece at a time.

        Raises:
            FileNotFoundError: it does not exist.
        """
        seen = hashlib.sha256()
        for piece in self.pieces(name, _HASHED):
            seen.update(piece)
        return seen.hexdigest()

    def size(self, name: str) -> int | None:
        """Return the size of `name` in bytes, or None when it does not exist.

        Raises:
            ValidationError: it is no regular file, or a link out of the folder.
        """
        found = self._files.head(self.key(name))
        return found and found.size

    def exists(self, name: str) -> bool:
        """Whether `name` exists."""
        return self.size(name) is not None

    def entries(self, folder: str = "") -> list[Entry]:
        """Return what is below a sub-folder (all of it by default), by name; names from here."""
        found, cut = self._files.list(self.key(f"{folder}/" if folder else "")), len(self.key(""))
        return sorted(Entry(o.key[cut:], o.size, o.modified.timestamp()) for o in found)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes of the files right in this folder whose names start with `prefix`.

        A remote store is asked once for each 1,000 files below the prefix, sub-folders included.
        """
        if not self.remote:
            return self._folder.sizes(prefix)
        cut = len(self.key(""))
        found = {o.key[cut:]: o.size for o in self.bucket.list(self.key(prefix))}
        return {name: size for name, size in found.items() if "/" not in name}

    def clear(self) -> None:
        """Remove this folder and all in it, if it is there."""
        if self.remote:
            for entry in self.entries():
                self.delete(entry.name)
        else:
            shutil.rmtree(self.root, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Delete `name`; what is not there is no error."""
        self._files.delete(self.key(name))

    def put(self, name: str, data: bytes, *, limit: int = MAX_WHOLE) -> None:
        """Write `name` whole and durable, replacing what was there.

        Args:
            limit: bytes that its reader takes.

        Raises:
            InputError: it is larger than `limit`.
        """
        refuse_unreadable(len(data), limit, self.url(name))
        _log.debug("write %s, %s bytes", self.url(name), f"{len(data):,}")
        self._files.put(self.key(name), data)

    def create(self, name: str, data: bytes, *, limit: int = MAX_WHOLE) -> None:
        """Write `name` whole and durable, only if it does not exist yet. Args: as of `put`.

        Raises:
            ConflictError: `name` exists.
            InputError: it is larger than `limit`.
        """
        url = self.url(name)
        refuse_unreadable(len(data), limit, url)
        _log.debug("create %s, %s bytes", url, f"{len(data):,}")
        try:
            if not (self.remote and self.single_writer):
                self._files.put(self.key(name), data, create=True)
            elif self.exists(name):
                raise FileExistsError(url)
            else:
                self.put(name, data, limit=limit)
        except FileExistsError as error:
            fix = "choose another output, or run the command again to see what is there"
            raise conflict("another process has already written this file", url, fix) from error

    def replace(self, name: str, data: bytes, before: bytes) -> None:
        """Write `name` whole and durable, only if it still holds `before` (or holds `data`).

        Raises:
            ConflictError: it holds something else, or nothing.
        """
        etag = None
        if self.remote and not self.single_writer:
            found = self.bucket.head(self.key(name))
            etag = None if found is None else found.etag
        try:
            there = self.read(name)
            if there == data:
                return
            if there != before:
                raise FileExistsError(self.url(name))
            if etag is None:
                self.put(name, data)
            else:
                self.bucket.put(self.key(name), data, replaces=etag)
        except (FileExistsError, FileNotFoundError) as error:
            what = "another process has changed this file in the meantime"
            raise conflict(what, self.url(name)) from error

    def publish(self, name: str, path: Path, sha256: str) -> None:
        """Make the finished, fsynced local file `path` visible as `name`, replacing what was there.

        Args:
            name: file name in this store; `folder/name` makes the folder.
            path: local file, on the same filesystem if this store is local (see `staging`).
            sha256: digest of the file, checked against what a remote store received.
        """
        _log.debug("publish %s, sha256 %s", self.url(name), sha256[:12])
        if self.remote:
            with io_errors(str(path)):
                upload(self.bucket, self.key(name), path, sha256)
        else:
            self._folder.publish(self.key(name), path)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a local folder for unfinished files; it is removed at the end, whatever happens."""
        with scratch() if self.remote else self._folder.staging() as folder:
            yield folder

    def clear_staging(self, prefix: str | None = None) -> None:
        """Remove local staging folders with a prefix, by default this store's."""
        if not self.remote:
            for stale in Path(self.root).glob((prefix or self.staging_prefix) + "*"):
                shutil.rmtree(stale, ignore_errors=True)


def refuse_unreadable(size: int, limit: int, where: str) -> None:
    """Refuse to write a file of `size` bytes that its reader takes up to `limit` bytes of.

    Raises:
        InputError: it is larger.
    """
    if size > limit:
        raise InputError(
            f"the file would have {size:,} bytes; one of its kind has at most {limit:,}",
            where=where,
            why="it has an entry for each input, shard or question; nothing could read it again",
            fix="join small inputs, take larger shards, or make several datasets and mix them",
        )


_AT_ONCE = 32 << 20  # bytes; the manifest of 2 * 10^12 tokens


def read_json(store: Store, name: str) -> bytes:
    """Return the bytes of a JSON file; of a large one that begins as none does, a piece is read.

    Raises:
        FileNotFoundError: there is no such file.
        MalformedJson: it is large, and no JSON within bounds.
        ValidationError: it is no regular file, a link out of the folder, or larger than
            `write_json` makes.
    """
    first = store.read(name, 0, min(_AT_ONCE, MAX_DOCUMENT + 1))
    if len(first) < min(_AT_ONCE, MAX_DOCUMENT + 1):
        return first
    refuse_large(store.size(name) or 0, MAX_DOCUMENT, store.url(name))
    rest = store.pieces(name, _AT_ONCE, len(first))  # it may have grown
    return gathered(chain([first], rest), MAX_DOCUMENT, store.url(name))


def write_json(store: Store, name: str, data: bytes) -> None:
    """Write a JSON file as `Store.put` does.

    Raises:
        InputError: it is larger than `read_json` takes.
    """
    store.put(name, data, limit=MAX_DOCUMENT)


def create_json(store: Store, name: str, data: bytes) -> None:
    """Write a JSON file as `Store.create` does, only if there is none.

    Raises:
        ConflictError: there is one.
        InputError: it is larger than `read_json` takes.
    """
    store.create(name, data, limit=MAX_DOCUMENT)
