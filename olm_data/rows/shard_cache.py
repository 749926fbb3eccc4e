"""Whole shards of remote datasets on the local disk, named by their content, within a byte budget.

    fetch: KEY.lock (flock) -> room under .lock -> .partial-KEY-SIZE/ -> sizes, sha256 -> KEY-SIZE/

A key is a digest of the shard's digests, so what lies under it is right whatever became of dataset,
lock or run. A folder appears by one rename when all its bytes are checked; a process that is killed
leaves a partial folder whose lock the kernel has dropped, and the next one clears it. Processes
share the folder: one fetches a shard while the others wait for it. Nothing is held open, so giving
a shard up frees its room at once, and a reader that finds it gone fetches it again.
Never: a file that was not checked, more bytes than the budget, a lock that outlives its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from olm_data.canonical import digest
from olm_data.errors import StorageError, ValidationError
from olm_data.rows.foresight import victims
from olm_data.storage.disk import io_errors, make_folder
from olm_data.storage.store import Store

PIECE = 8 << 20  # bytes of one request
_PARTIAL, _GONE = ".partial-", ".gone-"
_GIVEN_UP = ".given-up"
"""Folder of empty files, one a shard that was given up for room: it is not missed."""


class RemoteShard(NamedTuple):
    """A shard to be fetched.

    Attributes:
        store: the dataset.
        files: file name -> (bytes or None where only the digest is known, sha256).
    """

    store: Store
    files: dict[str, tuple[int | None, str]]

    @property
    def key(self) -> str:
        """Names the content: 32 hexadecimal digits."""
        return digest({name: sha256 for name, (_, sha256) in self.files.items()})[:32]

    @property
    def size(self) -> int:
        """Bytes of the files of known size."""
        return sum(size or 0 for size, _ in self.files.values())


class Stopped(Exception):
    """The fetch was given up because its reader was closed."""


class ShardCache:
    """A folder of shards.

    Args:
        folder: local folder; any number of processes may share it.
        budget: bytes of shards it may hold.

    Attributes:
        fetched: shards this process has downloaded.
    """

    def __init__(self, folder: str | os.PathLike[str], budget: int) -> None:
        self.folder, self.budget, self.fetched = Path(folder), budget, 0
        with io_errors(str(folder), writing=True):
            make_folder(str(self.folder / _GIVEN_UP))
            self._clear()

    def path(self, shard: RemoteShard) -> Path:
        """Return the folder in which a shard lies once it is fetched."""
        return self.folder / f"{shard.key}-{shard.size}"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each shard there is, by key."""
        return {key: size for key, size, _ in self._entries() if key}

    def fetch(
        self,
        shard: RemoteShard,
        next_use: Callable[[], Mapping[str, int]],
        *,
        later_than: int = -1,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Path | None:
        """Return the folder of a shard, fetched and checked if it was not there.

        Args:
            next_use: when shards, by key, are needed next.
            later_than: only shards needed after this step are given up for it.
            stopped: asked between pieces; once true, `Stopped` is raised.

        Returns:
            None where there is no room for it now.

        Raises:
            StorageError: it cannot be downloaded.
            ValidationError: what is downloaded is not what the manifest says, twice.
        """
        path = self.path(shard)
        if path.is_dir():
            return path
        with io_errors(str(self.folder), writing=True), _locked(self.folder / f"{shard.key}.lock"):
            if path.is_dir():
                return path
            partial = self._reserve(shard, next_use, later_than)
            if partial is None:
                return None
            try:
                for name, (size, sha256) in shard.files.items():
                    (partial / name).parent.mkdir(exist_ok=True, parents=True)
                    _download(shard.store, name, size, sha256, partial / name, stopped)
                os.replace(partial, path)
                (self.folder / _GIVEN_UP / shard.key).unlink(missing_ok=True)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        self.fetched += 1
        return path

    def given_up(self, shard: RemoteShard) -> bool:
        """Whether a shard is not there because another one needed its room."""
        return not self.path(shard).exists() and (self.folder / _GIVEN_UP / shard.key).exists()

    def discard(self, shard: RemoteShard) -> None:
        """Remove a shard that turned out to be damaged."""
        with io_errors(str(self.folder), writing=True), _locked(self.folder / ".lock"):
            self._remove(self.path(shard).name)

    def _reserve(
        self, shard: RemoteShard, next_use: Callable[[], Mapping[str, int]], later_than: int
    ) -> Path | None:
        """Make room and a folder for what arrives, whose name counts as its full size at once."""
        partial = self.folder / f"{_PARTIAL}{shard.key}-{shard.size}"
        with _locked(self.folder / ".lock"):
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            used = sum(size for _, size, _ in self._entries())
            there = {key: size for key, size, _ in self._entries() if key}
            gone = victims(there, next_use(), used + shard.size - self.budget, later_than)
            if gone is None:
                return None
            for key in gone:
                (self.folder / _GIVEN_UP / key).touch()
                self._remove(f"{key}-{there[key]}")
            partial.mkdir()
        return partial

    def _entries(self) -> Iterator[tuple[str, int, str]]:
        """Yield (key, or "" of a partial one, bytes, name) of what the folder holds."""
        for name in os.listdir(self.folder):
            head, _, size = name.rpartition("-")
            if size.isdigit() and not name.startswith(_GONE):
                yield "" if head.startswith(_PARTIAL) else head, int(size), name

    def _remove(self, name: str) -> None:
        """Take a shard out of sight at once, then delete it."""
        away = tempfile.mkdtemp(prefix=_GONE, dir=self.folder)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.folder / name, away)
        shutil.rmtree(away, ignore_errors=True)

    def _clear(self) -> None:
        """Remove what killed processes left behind."""
        with _locked(self.folder / ".lock"):
            for name in os.listdir(self.folder):
                if name.startswith(_GONE):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
        for key, _, name in list(self._entries()):
            if not key:
                lock = self.folder / f"{name.removeprefix(_PARTIAL).rpartition('-')[0]}.lock"
                with _locked(lock, wait=False) as mine:
                    if mine:
                        shutil.rmtree(self.folder / name, ignore_errors=True)


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the room that a cache in `folder` could have: free bytes and what it holds.

    Raises:
        ResourceError: the folder cannot be made.
    """
    with io_errors(os.fspath(folder), writing=True):
        make_folder(os.fspath(folder))
        held = sum(ShardCache(folder, 0).sizes().values())
        return shutil.disk_usage(folder).free + held


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file, or yield False where another holds it and `wait` is not set."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            yield False
            return
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                break
        os.close(handle)  # the former holder removed the file between our open and our lock
    try:
        yield True
    finally:
        if path.name != ".lock":
            os.unlink(path)
        os.close(handle)


def _download(
    store: Store,
    name: str,
    size: int | None,
    sha256: str,
    path: Path,
    stopped: Callable[[], bool],
) -> None:
    """Download a file and check it, once more where it arrived as something else."""
    for attempt in (1, 2):
        seen, count = hashlib.sha256(), 0
        try:
            with open(path, "wb") as file:
                for piece in store.pieces(name, PIECE):
                    if stopped():
                        raise Stopped
                    seen.update(piece)
                    count += len(piece)
                    file.write(piece)
        except FileNotFoundError as error:
            raise StorageError(
                "a shard's file is not there any more",
                where=store.url(name),
                fix="restore the dataset; the same command goes on from the last checkpoint",
            ) from error
        if seen.hexdigest() == sha256 and size in (None, count):
            return
        if attempt == 2:
            raise ValidationError(
                f"the file has not the bytes that the manifest promises ({count:,} arrived)",
                where=store.url(name),
                why="training on it would feed the model other tokens than were written",
                fix="restore the file from a copy, or tokenise its inputs again",
            )
