"""A disk that fails, or a process that dies, at operation number n of everything written to disk.

The modules that write (`MODULES`) get an `open` and an `os` of their own, which count: open for
writing, write (twice: before it, and with half of it done), fsync, replace, link, makedirs. At
number n the fault happens.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import olm_data.dataset.shard_writer
import olm_data.packing.row_plan
import olm_data.storage.disk
import olm_data.storage.store
import olm_data.tokenization.quarantine

MODULES = (
    olm_data.storage.disk,
    olm_data.storage.store,
    olm_data.dataset.shard_writer,
    olm_data.packing.row_plan,
    olm_data.tokenization.quarantine,
)
CALLS = ("fsync", "replace", "link", "makedirs")

Fault = Callable[[], None]


def kill() -> None:
    """Die at once, as by `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(errno: int) -> Fault:
    """Return a fault that is a system error."""

    def fault() -> None:
        raise OSError(errno, os.strerror(errno))

    return fault


class Counter:
    """Counts operations; at number `at` calls `fault`. Keeps the names of all."""

    def __init__(self, at: int, fault: Fault) -> None:
        self.at, self.fault = at, fault
        self.log: list[str] = []

    def __call__(self, name: str) -> None:
        self.log.append(name)
        if len(self.log) - 1 == self.at:
            self.fault()


class _Os:
    """The `os` module with counted calls."""

    def __init__(self, count: Counter) -> None:
        self._count = count

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count(f"{name} {_short(args[0])}")
            # what a killed process wrote is not lost with it, so fsync makes no difference here
            return None if name == "fsync" else real(*args, **kwargs)

        return counted


class _File:
    """A file whose writes are counted."""

    def __init__(self, file: Any, name: str, count: Counter) -> None:
        self._file, self._name, self._count = file, name, count

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._count(f"write {self._name}")
        half = self._file.write(view[: len(view) // 2])
        self._file.flush()
        self._count(f"half-written {self._name}")
        return int(half + self._file.write(view[half:]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _short(path: Any) -> str:
    return os.path.basename(path) if isinstance(path, (str, os.PathLike)) else "file"


@contextmanager
def faults(at: int, fault: Fault) -> Iterator[Counter]:
    """Let `fault` happen at operation number `at` (from 0) in the body; yields the counter."""
    count = Counter(at, fault)

    def counted_open(path: Any, mode: str = "r", **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return open(path, mode, **options)
        count(f"open {_short(path)}")
        return _File(open(path, mode, **options), _short(path), count)

    for module in MODULES:
        module.os = _Os(count)  # type: ignore[attr-defined]
        module.open = counted_open  # type: ignore[attr-defined]
    try:
        yield count
    finally:
        for module in MODULES:
            module.os = os  # type: ignore[attr-defined]
            del module.open
