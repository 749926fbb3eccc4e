"""A folder that outlives crashes: local directory or remote prefix, behind six operations.

A name becomes visible only when all its bytes are durable; there is no open-for-write handle,
because fsspec publishes a partial object when the body of `with fs.open(url, "wb")` raises.

    local:   temporary file -> fsync(file) -> rename | link -> fsync(directory)
    remote:  local file -> upload -> size and checksum of what arrived -> done

Never: list a directory to find data (manifests name everything), hold state between calls.
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
from pathlib import Path
from typing import Any

from olm_data.errors import ConflictError, OlmError, ResourceError, StorageError

LOCK_NAME = ".lock"
STAGING_PREFIX = ".staging-"


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether `url` names remote storage (`s3://...`) rather than a local path."""
    text = os.fspath(url)
    return "://" in text and not text.startswith("file://")


def filesystem(url: str) -> Any:
    """Return a fresh fsspec filesystem for `url`, with bounded timeouts and retries on S3.

    Raises:
        StorageError: the package for this kind of storage is missing.
    """
    import fsspec

    protocol = url.split("://", 1)[0]
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {
            "connect_timeout": 10,
            "read_timeout": 60,
            "retries": {"max_attempts": 8, "mode": "standard"},
        }
    try:
        return fsspec.filesystem(protocol, **options)
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"no support for {protocol}:// on this machine",
            where=url,
            fix=f"pip install 'olm[{'s3' if protocol in ('s3', 's3a') else 'hub'}]'  ({error})",
        ) from error


class Store:
    """A dataset's folder.

    Args:
        root: local path or URL of the folder; it is created by the first write.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        text = os.fspath(root)
        self.root = text.removeprefix("file://").rstrip("/") or "/"
        self.remote = is_remote(text)
        self._fs: Any = None

    def __reduce__(self) -> tuple[Any, ...]:  # a filesystem must not cross processes
        return Store, (self.root,)

    def __repr__(self) -> str:
        return f"Store({self.root!r})"

    @property
    def fs(self) -> Any:
        """The fsspec filesystem of a remote store, made on first use in this process."""
        if self._fs is None:
            self._fs = filesystem(self.root)
        return self._fs

    def url(self, name: str) -> str:
        """Return the path or URL of `name`."""
        return f"{self.root}/{name}"

    def child(self, name: str) -> Store:
        """Return the store of a sub-folder."""
        return Store(self.url(name))

    def read(self, name: str) -> bytes:
        """Return all bytes of `name`.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with io_errors(self.url(name)):
            if self.remote:
                return bytes(self.fs.cat_file(self.url(name)))
            return Path(self.url(name)).read_bytes()

    def size(self, name: str) -> int | None:
        """Return the size of `name` in bytes, or None when it does not exist."""
        with io_errors(self.url(name)):
            try:
                if self.remote:
                    return int(self.fs.info(self.url(name))["size"])
                return os.stat(self.url(name)).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def exists(self, name: str) -> bool:
        """Whether `name` exists."""
        return self.size(name) is not None

    def put(self, name: str, data: bytes) -> None:
        """Write `name` whole and durable, replacing what was there."""
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
        conflict = ConflictError(
            "somebody else has already written this file",
            where=url,
            why="two writers on one output would lose one of the two results",
            fix="choose another output, or run the command again to see what is there",
        )
        with io_errors(url, writing=True):
            if self.remote:
                try:
                    self.fs.pipe_file(url, data, mode="create")
                except OSError as error:
                    if isinstance(error, FileExistsError) or _precondition_failed(error):
                        raise conflict from error
                    raise
                self._check_upload(url, hashlib.md5(data).hexdigest(), len(data))
                return
            with self.staging() as staging:
                path = staging / "create"
                _write_durable(path, data)
                try:
                    os.link(path, url)
                except FileExistsError as error:
                    raise conflict from error
                _fsync_directory(Path(self.root))

    def publish(self, name: str, path: Path, sha256: str) -> None:
        """Make the finished, fsynced local file `path` visible as `name`, replacing what was there.

        Args:
            name: file name in this store.
            path: local file, on the same filesystem if this store is local (see `staging`).
            sha256: digest of the file, checked against what a remote store received.
        """
        url = self.url(name)
        with io_errors(url, writing=True):
            if self.remote:
                part = _part_size(path.stat().st_size)
                self.fs.put_file(str(path), url, chunksize=part)
                self._check_upload(url, _etag(path, part), path.stat().st_size, sha256)
                return
            os.replace(path, url)
            _fsync_directory(Path(self.root))

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a local folder for unfinished files; it is removed at the end, whatever happens."""
        with io_errors(self.root, writing=True):
            if self.remote:
                folder = Path(tempfile.mkdtemp(prefix="olm-"))
            else:
                _make_folder(self.root)
                folder = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.root))
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
            yield
            return
        with io_errors(self.root, writing=True):
            _make_folder(self.root)
            handle = _lock(self.url(LOCK_NAME))
        try:
            self._clear_staging()
            yield
        finally:
            self._clear_staging()
            os.unlink(self.url(LOCK_NAME))
            os.close(handle)

    def _clear_staging(self) -> None:
        for stale in Path(self.root).glob(STAGING_PREFIX + "*"):
            shutil.rmtree(stale, ignore_errors=True)

    def _check_upload(self, url: str, etag: str, size: int, sha256: str | None = None) -> None:
        info = self.fs.info(url)
        if info["size"] == size and str(info.get("ETag", "")).strip('"') == etag:
            return
        if info["size"] == size and sha256 is not None:  # the store's ETag is not an md5: read back
            seen = hashlib.sha256()
            with self.fs.open(url, "rb") as file:
                while chunk := file.read(1 << 22):
                    seen.update(chunk)
            if seen.hexdigest() == sha256:
                return
        elif info["size"] == size:
            return
        self.fs.rm_file(url)
        raise StorageError(
            "the store holds other bytes than were sent",
            where=url,
            why=f"sent {size:,} bytes, found {info['size']:,}",
            fix="run the same command again; finished shards are kept",
        )


@contextlib.contextmanager
def io_errors(where: str, *, writing: bool = False) -> Iterator[None]:
    """Turn system and storage errors into errors that say where and what to do.

    A missing file stays FileNotFoundError when reading; when writing, a missing folder or bucket is
    an error for the user.
    """
    try:
        yield
    except (OlmError, FileExistsError):
        raise
    except FileNotFoundError as error:
        if not writing:
            raise
        kind = StorageError if is_remote(where) else ResourceError
        raise kind(
            "the folder or bucket to write to does not exist",
            where=where,
            fix="create it first, or choose another output",
        ) from error
    except OSError as error:
        raise _translated(error, where) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("botocore", "aiobotocore", "aiohttp", "s3fs"):
            raise StorageError(
                f"remote storage refused: {type(error).__name__}: {error}",
                where=where,
                fix="check endpoint, bucket and credentials, then run the command again",
            ) from error
        raise


def _translated(error: OSError, where: str) -> OlmError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = None
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(_existing_parent(where)).free
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
    kind = StorageError if is_remote(where) else ResourceError
    return kind(
        f"input/output error: {error.strerror or error}",
        where=where,
        fix="run the same command again; finished work is kept",
    )


def _precondition_failed(error: OSError) -> bool:
    """Whether S3 refused a conditional create because the object exists."""
    response = getattr(error.__cause__, "response", {})
    code = response.get("Error", {}).get("Code")
    return code in ("PreconditionFailed", "ConditionalRequestConflict")


def _existing_parent(path: str) -> Path:
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


def _part_size(size: int) -> int:
    """Part size of a multipart upload: at most 9,000 of the 10,000 parts S3 allows."""
    return max(16 << 20, -(-size // 9000))


def _etag(path: Path, part: int) -> str:
    """The ETag S3 gives this file: its md5, or after a multipart upload the md5 of the md5s."""
    if path.stat().st_size < 2 * part:  # s3fs sends it in one request
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()
    digests = []
    with open(path, "rb") as file:
        while chunk := file.read(part):
            digests.append(hashlib.md5(chunk).digest())
    return f"{hashlib.md5(b''.join(digests)).hexdigest()}-{len(digests)}"
