"""Where an export goes: a local folder that appears at once, or a remote prefix with a receipt.

    local:   .NAME.exporting-N/ beside the output -> fsync -> renamed to it
    remote:  claim -> each finished file uploaded, verified -> receipt, created last -> claim gone

A prefix has no rename, so its files are seen as they come; what tells a whole export is the receipt
`olm-export.json`. The claim says whose the files are until then: the same export replaces them, any
other is refused. What fails here takes its files away again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from olm_data.bounded_json import sha256_file
from olm_data.errors import ConflictError, OlmError
from olm_data.regular_files import MAX_WHOLE, read_regular
from olm_data.storage.disk import fsync_path, io_errors, write_durable
from olm_data.storage.exclusive import exclusive
from olm_data.storage.lease import Lease, acquire
from olm_data.storage.names import is_working
from olm_data.storage.store import Store, is_remote, refuse_unreadable

RECORD = "olm-export.json"
"""The receipt: of which dataset the export is, and how large each file is."""
CLAIM = ".olm-exporting.json"
"""Of a remote export that is not finished: which one it is."""
_LOOKED_AT = 1000
_BUSY = "another process exports to this place"
_FIX = "wait for it to finish, or choose another --output"


class LocalFolder:
    """A folder that is made by one rename."""

    remote = False

    def __init__(self, output: str) -> None:
        self.output, self._place = output, Path(output.removeprefix("file://"))

    def receipt(self) -> bytes | None:
        """Return the receipt of a finished export, None where the folder is free.

        Raises:
            ConflictError: it holds something else.
        """
        path = self._place / RECORD
        with io_errors(str(path)):
            if path.exists():
                return read_regular(path, MAX_WHOLE)
            self._refuse_filled()
        return None

    def size(self, name: str) -> int | None:
        """Return the size of a file, None where there is none."""
        file = self._place / name
        return file.stat().st_size if file.is_file() else None

    @contextmanager
    def draft(self, claim: bytes) -> Iterator[Draft]:
        """Yield an empty draft that is ours alone; it is gone at the end unless committed.

        Raises:
            ConflictError: another process exports to this place.
        """
        place = self._place.absolute()
        parent, beside = place.parent, f".{place.name}.exporting-"
        store = Store(str(parent))
        lease = acquire(store, prefix=f"{beside}lease-", busy=_BUSY, fix=_FIX)
        folder = parent / f"{beside}{lease.fence.number:06d}"
        try:
            for stale in parent.iterdir():  # of killed runs
                if stale.name.startswith(beside) and stale.is_dir():
                    shutil.rmtree(stale, ignore_errors=True)
            with io_errors(self.output, writing=True):
                os.mkdir(folder)
            yield _LocalDraft(folder, self, lease)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lease.release(keep=False)

    def rename(self, folder: Path) -> None:
        """Make a finished folder the output; an empty one there is replaced."""
        self._refuse_filled()
        os.rename(folder, self._place)  # the kernel refuses any folder that is not empty
        fsync_path(self._place.absolute().parent)

    def _refuse_filled(self) -> None:
        place = self._place
        if place.exists() and not (place.is_dir() and not any(place.iterdir())):
            raise in_the_way(self.output, "the output is not empty")


class _LocalDraft:
    def __init__(self, folder: Path, place: LocalFolder, lease: Lease) -> None:
        self.folder, self._place, self._lease = folder, place, lease
        self.sizes: dict[str, int] = {}

    def settle(self) -> None:
        """Wait until the new files are on the disk."""
        for path in sorted(self.folder.iterdir()):
            if path.name not in self.sizes:
                fsync_path(path)
                self.sizes[path.name] = path.stat().st_size

    def commit(self, receipt: bytes) -> None:
        """Rename the folder to the output."""
        refuse_unreadable(len(receipt), MAX_WHOLE, f"{self._place.output}/{RECORD}")
        write_durable(self.folder / RECORD, receipt)
        fsync_path(self.folder)
        self._lease.check()
        self._place.rename(self.folder)


class RemotePrefix:
    """A prefix of a bucket."""

    remote = True

    def __init__(self, output: str) -> None:
        self.output, self._store = output, Store(output)

    def receipt(self) -> bytes | None:
        """Return the receipt of a finished export, None where the prefix is free or claimed.

        Raises:
            ConflictError: it holds something else.
        """
        with contextlib.suppress(FileNotFoundError):
            return self._store.read(RECORD, limit=MAX_WHOLE)
        prefix = self._store.key("")
        found = islice(self._store.bucket.list(prefix), _LOOKED_AT)  # dots come first
        names = {item.key.removeprefix(prefix) for item in found}
        if CLAIM not in names and not all(map(is_working, names)):
            raise in_the_way(self.output, "the output is not empty")
        return None

    def size(self, name: str) -> int | None:
        """Return the size of an object, None where there is none."""
        return self._store.size(name)

    @contextmanager
    def draft(self, claim: bytes) -> Iterator[Draft]:
        """Yield an empty draft that is ours alone; what fails takes its objects away again.

        Raises:
            ConflictError: another process exports to this place, or left another export there.
            StorageError: the store does not keep two writers apart.
        """
        with exclusive(self._store, busy=_BUSY, fix=_FIX) as lease, self._store.staging() as folder:
            if self.receipt() is not None:
                raise in_the_way(self.output, "another process has just exported to it")
            fresh = self._claim(claim)
            draft = _RemoteDraft(folder / "export", self._store, lease)
            try:
                yield draft
            except BaseException:
                # files of a killed run stay under its claim: this run may not know all their names
                if fresh and not draft.committed:
                    draft.withdraw()
                raise

    def _claim(self, claim: bytes) -> bool:
        """Say whose the files will be. Returns whether nobody had said so before.

        Raises:
            ConflictError: they are those of another export.
        """
        if not self._store.exists(CLAIM):
            self._store.create(CLAIM, claim)
            return True
        if self._store.read(CLAIM, limit=MAX_WHOLE) != claim:
            raise in_the_way(
                self.output, f"{CLAIM} says that another export was begun there and not ended"
            )
        return False


class _RemoteDraft:
    def __init__(self, folder: Path, store: Store, lease: Lease) -> None:
        self.folder, self._store, self._lease = folder, store, lease
        self.sizes: dict[str, int] = {}
        self.committed = False
        folder.mkdir()

    def settle(self) -> None:
        """Upload the new files, those that name others last, and remove them here."""
        for path in sorted(self.folder.iterdir(), key=lambda p: (p.suffix == ".json", p.name)):
            sha256 = sha256_file(path)
            self.sizes[path.name] = path.stat().st_size
            self._lease.check()
            self._store.publish(path.name, path, sha256)
            path.unlink()

    def commit(self, receipt: bytes) -> None:
        """Write the receipt, and take back the claim."""
        self._lease.check()
        self._store.create(RECORD, receipt)
        self.committed = True
        self._store.delete(CLAIM)

    def withdraw(self) -> None:
        """Delete what was uploaded, unless another process has taken over."""
        with contextlib.suppress(OlmError):  # the error that led here is the one to hear of
            self._lease.check()
            for name in [*self.sizes, CLAIM]:
                self._store.delete(name)


Draft = _LocalDraft | _RemoteDraft
"""An export in the making: `folder`, empty at first, where files are written, and the `sizes` of
those that were settled."""


def destination(output: str) -> LocalFolder | RemotePrefix:
    """Return where `output` is."""
    return RemotePrefix(output) if is_remote(output) else LocalFolder(output)


def in_the_way(place: str, why: str) -> ConflictError:
    """Return the error that an output holds something else."""
    return ConflictError(
        "the output holds something else",
        where=place,
        why=why,
        fix="choose another output, or remove what is there",
    )
