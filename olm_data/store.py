"""A folder that outlives crashes: local directory or remote prefix, behind six operations.

A name becomes visible only when all its bytes are durable; there is no open-for-write handle,
because fsspec publishes a partial object when the body of `with fs.open(url, "wb")` raises.

    local:   temporary file -> fsync(file) -> rename | link -> fsync(directory)
    remote:  local file -> upload -> size and checksum of what arrived -> done

Never: list a directory to find data (manifests and plans name everything; a listing tells only
which of these names are there), hold state between calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from olm_data.errors import (
    ConflictError,
    OlmError,
    ResourceError,
    UsageError,
    ValidationError,
    printable,
    refuse_secrets,
)
from olm_data.s3 import Bucket, split_url
from olm_data.scratch import abandoned, scratch

LOCK_NAME = ".lock"
STAGING_PREFIX = ".staging-"
WORKER_PREFIX = ".worker-"
"""Staging folders of workers that an earlier parent may have left at work: kept by `exclusive`
until its end."""


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether `url` names remote storage (`s3://...`) rather than a local path."""
    text = os.fspath(url)
    return "://" in text and not text.startswith("file://")


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
        root: local path or `s3://bucket/prefix` of the folder; it is created by the first write.
        single_writer: nobody else writes here, so `create` may look first and then write: for a
            store that does not honour conditional writes.
        staging_prefix: start of the names of local folders for unfinished files.

    Raises:
        UsageError: the URL is of another kind of storage, or holds credentials.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        single_writer: bool = False,
        staging_prefix: str = STAGING_PREFIX,
    ) -> None:
        text = os.fspath(root)
        self.staging_prefix = staging_prefix
        self.root = text.removeprefix("file://").rstrip("/") or "/"
        self.remote = is_remote(text)
        self.single_writer = single_writer
        if self.remote:
            refuse_secrets(text)
            if not text.startswith("s3://"):
                raise UsageError(
                    f"datasets at {text.partition('://')[0]}:// are not supported",
                    fix="use a local path or s3://BUCKET/PREFIX",
                )
            bucket, self._prefix = split_url(text)
            self.bucket = Bucket(bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Store, **self._options), (self.root,)

    @property
    def _options(self) -> dict[str, Any]:
        return {"single_writer": self.single_writer, "staging_prefix": self.staging_prefix}

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
        """Return the key of `name` in the bucket of a remote store."""
        refuse_escape(name)
        return f"{self._prefix}/{name}" if self._prefix else name

    def child(self, name: str) -> Store:
        """Return the store of a sub-folder."""
        return Store(self.url(name), **self._options)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of `name`, all of them by default.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if self.remote:
            return self.bucket.get(self.key(name), start, stop)
        with io_errors(self.url(name)), open(self.url(name), "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else max(0, stop - start))

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of `name` in pieces of `size`.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if self.remote:
            known = self.bucket.head(self.key(name))
            if known is None:
                raise FileNotFoundError(self.url(name))
            for start in range(0, known.size, size):
                stop = min(known.size, start + size)
                yield self.bucket.get(self.key(name), start, stop, etag=known.etag)
            return
        with io_errors(self.url(name)), open(self.url(name), "rb") as file:
            while piece := file.read(size):
                yield piece

    def refuse_links(self, *names: str) -> None:
        """Refuse local files that are links to places outside this folder.

        Raises:
            ValidationError: one is.
        """
        for name in () if self.remote else names:
            path = self.url(name)
            if os.path.islink(path):
                root, place = os.path.realpath(self.root), os.path.realpath(path)
                if os.path.commonpath([root, place]) != root:
                    raise ValidationError(
                        "a file of the dataset is a link to another place",
                        where=path,
                        why=f"it leads to {printable(place)}, outside the dataset's folder",
                        fix="copy the file there, or give the folder in which it lies",
                    )

    def size(self, name: str) -> int | None:
        """Return the size of `name` in bytes, or None when it does not exist."""
        if self.remote:
            found = self.bucket.head(self.key(name))
            return None if found is None else found.size
        with io_errors(self.url(name)):
            try:
                return os.stat(self.url(name)).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def exists(self, name: str) -> bool:
        """Whether `name` exists."""
        return self.size(name) is not None

    def entries(self, folder: str = "") -> list[Entry]:
        """Return what is below a sub-folder (all of it by default), by name; names from here."""
        if self.remote:
            prefix = self.key(f"{folder}/" if folder else "")
            cut = len(self.key(""))
            found = self.bucket.list(prefix)
            return [Entry(o.key[cut:], o.size, o.modified.timestamp()) for o in found]
        entries = []
        with io_errors(self.url(folder)):
            for place, _, names in os.walk(self.url(folder) if folder else self.root):
                for name in names:
                    path = Path(place, name)
                    with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                        stat = path.lstat()
                        relative = str(path.relative_to(self.root))
                        entries.append(Entry(relative, stat.st_size, stat.st_mtime))
        return sorted(entries)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes of the files right in this folder whose names start with `prefix`.

        A remote store is asked once for each 1,000 files below the prefix, sub-folders included.
        """
        if self.remote:
            cut = len(self.key(""))
            found = {o.key[cut:]: o.size for o in self.bucket.list(self.key(prefix))}
            return {name: size for name, size in found.items() if "/" not in name}
        with io_errors(self.root):
            return _sizes_in_folder(self.root, prefix)

    def clear(self) -> None:
        """Remove this folder and all in it, if it is there."""
        if self.remote:
            for entry in self.entries():
                self.delete(entry.name)
        else:
            shutil.rmtree(self.root, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Delete `name`; what is not there is no error."""
        if self.remote:
            self.bucket.delete(self.key(name))
            return
        with io_errors(self.url(name), writing=True), contextlib.suppress(FileNotFoundError):
            os.unlink(self.url(name))

    def put(self, name: str, data: bytes) -> None:
        """Write `name` whole and durable, replacing what was there."""
        if self.remote:
            self.bucket.put(self.key(name), data)
            return
        with io_errors(self.url(name), writing=True), self.staging() as staging:
            path = staging / "put"
            _write_durable(path, data)
            self.publish(name, path, hashlib.sha256(data).hexdigest())

    def create(self, name: str, data: bytes) -> None:
        """Write `name` whole and durable, only if it does not exist yet.

        Raises:
            ConflictError: `name` exists.
        """
        url = self.url(name)
        try:
            if not self.remote:
                self._create_local(name, data)
            elif not self.single_writer:
                self.bucket.put(self.key(name), data, create=True)
            elif self.exists(name):
                raise FileExistsError(url)
            else:
                self.put(name, data)
        except FileExistsError as error:
            raise ConflictError(
                "somebody else has already written this file",
                where=url,
                why="two writers on one output would lose one of the two results",
                fix="choose another output, or run the command again to see what is there",
            ) from error

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
            raise ConflictError(
                "somebody else has changed this file in the meantime",
                where=self.url(name),
                why="two writers on one output would lose one of the two results",
                fix="run the command again: it starts from what is there now",
            ) from error

    def _create_local(self, name: str, data: bytes) -> None:
        with io_errors(self.url(name), writing=True), self.staging() as staging:
            path = staging / "create"
            _write_durable(path, data)
            os.link(path, self.url(name))
            _fsync_directory(Path(self.root))

    def publish(self, name: str, path: Path, sha256: str) -> None:
        """Make the finished, fsynced local file `path` visible as `name`, replacing what was there.

        Args:
            name: file name in this store; `folder/name` makes the folder.
            path: local file, on the same filesystem if this store is local (see `staging`).
            sha256: digest of the file, checked against what a remote store received.
        """
        if self.remote:
            with io_errors(str(path)):
                self.bucket.upload(self.key(name), path, sha256)
            return
        url = self.url(name)
        with io_errors(url, writing=True):
            folder = os.path.dirname(url)
            if not os.path.isdir(folder):  # the first file of a sub-folder
                _make_folder(folder)
                _fsync_directory(Path(folder).parent)
            os.replace(path, url)
            _fsync_directory(Path(folder))

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a local folder for unfinished files; it is removed at the end, whatever happens."""
        if self.remote:
            with scratch() as folder:
                yield folder
            return
        with io_errors(self.root, writing=True):
            _make_folder(self.root)
            folder = Path(tempfile.mkdtemp(prefix=self.staging_prefix, dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold this folder as its only local writer; clear what killed writers and workers left.

        The kernel drops the lock when the process dies, so it is never stale. Remote folders have
        no such lock: there the conditional create of the manifest decides.

        Raises:
            ConflictError: another process on this machine writes here.
        """
        if self.remote:
            abandoned(remove=True)
            yield
            return
        with io_errors(self.root, writing=True):
            _make_folder(self.root)
            handle = _lock(self.url(LOCK_NAME))
        try:
            self._clear_staging(STAGING_PREFIX)
            yield
        finally:
            self._clear_staging(STAGING_PREFIX)
            self._clear_staging(WORKER_PREFIX)
            os.unlink(self.url(LOCK_NAME))
            os.close(handle)

    def clear_staging(self) -> None:
        """Remove what killed processes left of staging folders with this store's prefix."""
        if not self.remote:
            self._clear_staging(self.staging_prefix)

    def _clear_staging(self, prefix: str) -> None:
        for stale in Path(self.root).glob(prefix + "*"):
            shutil.rmtree(stale, ignore_errors=True)


def _sizes_in_folder(folder: str, prefix: str) -> dict[str, int]:
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                    found[entry.name] = entry.stat().st_size
    return found


def refuse_escape(name: str) -> None:
    """Refuse a name that leads out of the folder it is looked for in, or forges a log line.

    Raises:
        ValidationError: it does.
    """
    parts = name.removesuffix("/").split("/")
    if name and (not name.isprintable() or "\\" in name or {"", ".", ".."} & set(parts)):
        raise ValidationError(
            "a name leads out of its folder",
            where=printable(name),
            why="a manifest or plan that names files elsewhere was not written by olm-data",
            fix="do not use this dataset; restore it from a copy",
        )


@contextlib.contextmanager
def io_errors(where: str, *, writing: bool = False) -> Iterator[None]:
    """Turn errors of the local disk into errors that say where and what to do.

    A missing file stays FileNotFoundError when reading; when writing, a missing folder is an error
    for the user.
    """
    try:
        yield
    except (OlmError, FileExistsError):
        raise
    except FileNotFoundError as error:
        if not writing:
            raise
        raise ResourceError(
            "the folder to write to does not exist",
            where=where,
            fix="create it first, or choose another output",
        ) from error
    except OSError as error:
        raise _translated(error, where) from error


def _translated(error: OSError, where: str) -> OlmError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = None
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(existing_parent(where)).free
        room = "" if free is None else f"; {free:,} bytes are free there"
        return ResourceError(
            f"no space left to write{room}",
            where=where,
            fix="make room, then run the same command again; finished work is kept",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ResourceError(
            f"not allowed: {error.strerror}",
            where=where,
            fix="choose a folder you may write to, or change its permissions",
        )
    return ResourceError(
        f"input/output error: {error.strerror or error}",
        where=where,
        fix="run the same command again; finished work is kept",
    )


def existing_parent(path: str) -> Path:
    """Return the nearest folder above a path (or itself) that exists."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return place


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ResourceError(
            "a file is in the way of the folder to write to",
            where=path,
            fix="choose another output, or move the file",
        ) from error


def _write_durable(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock(path: str) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise ConflictError(
                "another process is writing this output",
                where=os.path.dirname(path),
                fix="wait for it to finish, or choose another --output",
            ) from error
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)  # the former holder removed the file between our open and our lock
