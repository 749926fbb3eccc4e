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
    UsageError,
    ValidationError,
    printable,
    refuse_secrets,
)
from olm_data.storage.disk import (
    fsync_directory,
    io_errors,
    lock_file,
    make_folder,
    sizes_in_folder,
    write_durable,
)
from olm_data.storage.s3 import Bucket, split_url
from olm_data.storage.scratch import abandoned, scratch

LOCK_NAME = ".lock"
STAGING_PREFIX = ".staging-"
WORKER_PREFIX = ".worker-"
_HASHED = 4 << 20  # bytes
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

    def sha256(self, name: str) -> str:
        """Return the sha256 of `name`, read a piece at a time.

        Raises:
            FileNotFoundError: it does not exist.
        """
        seen = hashlib.sha256()
        for piece in self.pieces(name, _HASHED):
            seen.update(piece)
        return seen.hexdigest()

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
            return sizes_in_folder(self.root, prefix)

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
            write_durable(path, data)
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
            write_durable(path, data)
            os.link(path, self.url(name))
            fsync_directory(Path(self.root))

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
                make_folder(folder)
                fsync_directory(Path(folder).parent)
            os.replace(path, url)
            fsync_directory(Path(folder))

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a local folder for unfinished files; it is removed at the end, whatever happens."""
        if self.remote:
            with scratch() as folder:
                yield folder
            return
        with io_errors(self.root, writing=True):
            make_folder(self.root)
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
            make_folder(self.root)
            handle = lock_file(self.url(LOCK_NAME))
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
