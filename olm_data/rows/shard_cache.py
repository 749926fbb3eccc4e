"""Whole shards of remote datasets on the local disk, named by their content, within a byte budget.

    fetch: KEY.lock -> room under .lock -> .partial-KEY-PROCESS-SIZE/ -> sizes, sha256 -> KEY-SIZE/

A key is a digest of the shard's digests, so what lies under it is right whatever became of dataset,
lock or run. A folder appears by one rename when all its bytes are checked; a process that is killed
leaves a partial folder whose lock the kernel has dropped, and the next one clears it. Processes
share the folder: one fetches a shard while the others wait for it; where locks do nothing, each
fetches it for itself and one of them is kept. Nothing is held open, so giving a shard up frees its
room at once, and a reader that finds it gone fetches it again.

Also: when shards are needed next, and which to give up for room. Pure.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import digest
from olm_data.dataset.record import damaged
from olm_data.errors import StorageError
from olm_data.storage.disk import io_errors, locked, make_folder
from olm_data.storage.process import Process, ProcessState, state_of, this_process
from olm_data.storage.store import Store

Int64 = NDArray[np.int64]
NEVER = 1 << 62
"""The next use of what has no known use."""


class NextUses:
    """The uses of shards in the steps that are known.

    Args:
        steps: integers [m], the step of each use.
        shards: integers [m], the shard that is used; a pair may be repeated.
    """

    def __init__(self, steps: Any = (), shards: Any = ()) -> None:
        pairs = np.stack([np.asarray(shards, np.int64), np.asarray(steps, np.int64)])
        pairs = np.unique(pairs, axis=1)  # by shard, then by step
        known, first = np.unique(pairs[0], return_index=True)
        parts = np.split(pairs[1], first[1:]) if len(known) else []
        self._steps: dict[int, Int64] = dict(zip(known.tolist(), parts, strict=True))

    def next_use(self, shard: int, step: int) -> int:
        """Return the first step from `step` on that uses a shard, or `NEVER`."""
        steps = self._steps.get(shard)
        if steps is None or steps[-1] < step:
            return NEVER
        return int(steps[np.searchsorted(steps, step)])

    def in_order(self, step: int) -> list[int]:
        """Return the shards used from `step` on, the one that is needed first first."""
        uses = [(self.next_use(shard, step), shard) for shard in self._steps]
        return [shard for use, shard in sorted(uses) if use != NEVER]


def victims(
    sizes: Mapping[str, int], next_use: Mapping[str, int], room: int, later_than: int
) -> list[str] | None:
    """Choose what to give up for `room` bytes.

    Args:
        sizes: bytes of each thing there is.
        next_use: step at which it is needed next; what is missing here is never needed.
        room: bytes wanted; nothing is given up for 0 or less.
        later_than: only what is needed after this step may go.

    Returns:
        Names, the furthest next use first; None where not enough may go.
    """
    chosen: list[str] = []
    for name in sorted(sizes, key=lambda name: (-next_use.get(name, NEVER), name)):
        if room <= 0:
            break
        if next_use.get(name, NEVER) <= later_than:
            return None
        chosen.append(name)
        room -= sizes[name]
    return chosen if room <= 0 else None


_fetches = itertools.count()  # of this process: threads share no partial folder
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
        self.folder, self.budget = Path(folder), budget
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
        with io_errors(str(self.folder), writing=True), locked(self.folder / f"{shard.key}.lock"):
            if path.is_dir():
                return path
            partial = self._reserve(shard, next_use, later_than)
            if partial is None:
                return None
            try:
                for name, (size, sha256) in shard.files.items():
                    (partial / name).parent.mkdir(exist_ok=True, parents=True)
                    _download(shard.store, name, size, sha256, partial / name, stopped)
                if not _taken_in(partial, path):
                    return path
                (self.folder / _GIVEN_UP / shard.key).unlink(missing_ok=True)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        return path

    def given_up(self, shard: RemoteShard) -> bool:
        """Whether a shard is not there because another one needed its room."""
        return not self.path(shard).exists() and (self.folder / _GIVEN_UP / shard.key).exists()

    def discard(self, shard: RemoteShard) -> None:
        """Remove a shard that turned out to be damaged."""
        with io_errors(str(self.folder), writing=True), locked(self.folder / ".lock", remove=False):
            self._remove(self.path(shard).name)

    def _reserve(
        self, shard: RemoteShard, next_use: Callable[[], Mapping[str, int]], later_than: int
    ) -> Path | None:
        """Make room and a folder for what arrives, whose name counts as its full size at once."""
        partial = self.folder / f"{_PARTIAL}{shard.key}-{_spelled(this_process())}-{shard.size}"
        with locked(self.folder / ".lock", remove=False):
            for _, _, name in list(self._entries()):
                if name.startswith(f"{_PARTIAL}{shard.key}-") and not _in_use(name):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
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
        with locked(self.folder / ".lock", remove=False):
            for name in os.listdir(self.folder):
                if name.startswith(_GONE):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
        for key, _, name in list(self._entries()):
            if not key:
                lock = self.folder / f"{name.removeprefix(_PARTIAL).partition('-')[0]}.lock"
                with locked(lock, wait=False) as mine:
                    if mine is not None and not _in_use(name):
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


def _taken_in(partial: Path, path: Path) -> bool:
    """Give a fetched shard its name; False where another process did so meanwhile."""
    try:
        os.replace(partial, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        return False
    return True


def _spelled(process: Process) -> str:
    return f"{process.machine}.{process.pid}.{process.started}.{next(_fetches)}"


def _in_use(name: str) -> bool:
    """Whether the process that a partial folder's name spells lives on this machine."""
    fields = name.split("-")[-2].split(".")
    if len(fields) != 4 or not all(field.isdecimal() for field in fields[1:]):
        return False
    process = Process("", fields[0], int(fields[1]), int(fields[2]))
    return state_of(process) in (ProcessState.running, ProcessState.stopped)


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
        try:
            seen = store.download(name, path, stopped=stopped)
        except FileNotFoundError as error:
            raise StorageError(
                "a shard's file is not there any more",
                where=store.url(name),
                fix="restore the dataset; the same command goes on from the last checkpoint",
            ) from error
        if seen is None:
            raise Stopped
        count = path.stat().st_size
        if seen == sha256 and size in (None, count):
            return
        if attempt == 2:
            said = f"the file is not the one that the manifest describes ({count:,} arrived)"
            raise damaged(store.url(name), said)
