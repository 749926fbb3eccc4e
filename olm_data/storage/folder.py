"""A local folder by the operations of a bucket: the one place that mistrusts what lies on a disk.

    name -> open | get | pieces | head -> a regular file, no link out of the folder; else refused
         -> put | publish -> temporary file -> fsync(file) -> rename | link -> fsync(folder)

Names come checked from `Store`. Every error of the system says where, and what to do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from olm_data.regular_files import (
    MAX_WHOLE,
    open_regular,
    read_regular,
    refuse_link_out,
    refuse_special,
)
from olm_data.storage.disk import fsync_directory, io_errors, make_folder, write_durable
from olm_data.storage.objects import Object


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
        with io_errors(self.url(name)):
            return open_regular(self.url(name), within=self._within)

    def get(
        self, name: str, start: int = 0, stop: int | None = None, *, most: int | None = None
    ) -> bytes:
        """Return bytes [start, stop) of a file, as many of them as it has; all: at most `most`."""
        with io_errors(self.url(name)):
            if stop is None:
                return read_regular(self.url(name), most or MAX_WHOLE, within=self._within)[start:]
            with open_regular(self.url(name), within=self._within) as file:
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
        with io_errors(self.url(name)):
            try:
                there = os.stat(self.url(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
            refuse_special(there.st_mode, self.url(name))
            refuse_link_out(self.url(name), self._within)
            return _object(name, there)

    def list(self, below: str = "") -> Iterator[Object]:
        """Yield the files below a sub-folder, `folder/`, or all; of a link what it is itself."""
        with io_errors(self.url(below)):
            for place, _, names in os.walk(self.url(below)):
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
                fsync_directory(Path(self.root))
            else:
                self.publish(name, made)

    def publish(self, name: str, path: Path) -> None:
        """Make a finished, fsynced file of the same file system visible as `name`."""
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
