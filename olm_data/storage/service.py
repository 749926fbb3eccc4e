"""One attempt at each request to a store, as the file systems of fsspec make it.

    Google | Azure | Memory | Web | Hub -> Service <- cloud.CloudBucket

Never: an attempt of its own after one that failed; work that goes on behind an exception, as
whoever is interrupted cancels the request.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from olm_data.errors import words
from olm_data.storage.bucket import Condition, Got
from olm_data.storage.disk import io_errors
from olm_data.storage.objects import Object

CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 30.0  # seconds
SLOWEST = 50_000
"""Bytes a second that sending a body takes at least; else it is given up."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Refusal(Exception):
    """What a store answered in place of what was asked for.

    Args:
        status: of HTTP.
        code: the store's own name for it, "" where it told none.
        message: its words.
        request: its id of the request.
    """

    def __init__(self, status: int, code: str = "", message: str = "", request: str = "") -> None:
        super().__init__(f"{status} {words(code)}".strip())
        self.status, self.code = status, words(code)
        self.message, self.request = words(message), words(request)


class Service(ABC):
    """One attempt at each request to a store.

    Every method raises what the file system raises, FileNotFoundError where there is no such
    object, FileExistsError where a condition does not hold.

    Attributes:
        settings: start of the names of environment variables it depends on.
        address, login: what the user checks where it is not reached, or refuses.
    """

    settings: tuple[str, ...] = ()
    address = "the address"
    login = "the credentials"

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme

    @abstractmethod
    def endpoint(self) -> str:
        """Return the address that requests go to."""

    @abstractmethod
    def head(self, bucket: str, key: str) -> Object:
        """Return what is known of an object."""

    @abstractmethod
    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> Got:
        """Read a range of any version, or of the one that `etag` names."""

    @abstractmethod
    def put(self, bucket: str, key: str, data: bytes, condition: Condition | None) -> bool:
        """Write an object. Returns whether it is proved that these bytes arrived."""

    @abstractmethod
    def put_file(self, bucket: str, key: str, path: Path) -> bool:
        """Write a file as an object, as `put`."""

    @abstractmethod
    def writer(self, bucket: str, key: str) -> str | None:
        """Return what `put` was told of an object's writer."""

    @abstractmethod
    def page(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        """Return objects of a listing from `more` on (None: the start), and where to go on."""

    @abstractmethod
    def delete(self, bucket: str, key: str) -> None:
        """Delete an object."""

    @abstractmethod
    def now(self, bucket: str) -> datetime:
        """Return the store's own clock."""

    def refusal(self, error: Exception) -> Refusal | None:
        """Return what the store answered, None where no answer came."""
        return error if isinstance(error, Refusal) else None

    def close(self) -> None:  # noqa: B027  # most have none
        """Close its connections."""


def is_connection(error: BaseException) -> bool:
    """Whether an error says that no whole answer came."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    module, name = type(error).__module__.partition(".")[0], type(error).__name__
    if module == "azure":
        return name.startswith(("ServiceRequest", "ServiceResponse", "IncompleteRead"))
    return module in ("aiohttp", "requests", "urllib3", "httpx", "httpcore", "google")


def event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's loop for remote storage, in a thread of its own.

    Not fsspec's: parts of an upload that fail beside the one that is reported would be printed
    there by asyncio, with what the store sent.
    """
    return _event_loop(os.getpid())


@lru_cache(maxsize=1)
def _event_loop(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(
        lambda _, told: _log.debug("beside: %s", type(told.get("exception")).__name__)
    )
    threading.Thread(target=loop.run_forever, name="storage", daemon=True).start()
    return loop


def run(loop: Any, work: Coroutine[Any, Any, T], sends: int = 0) -> T:
    """Return what a coroutine returns; it is cancelled where this is interrupted.

    `fsspec.asyn.sync` would let it go on: an upload would appear after the exception.

    Args:
        loop: of the file system, in its thread.
        sends: bytes of its body; it is given up where they go out too slowly.
    """

    async def bounded() -> T:
        parts = 1 + sends // (1 << 20)
        limit = CONNECT_TIMEOUT + READ_TIMEOUT * parts + sends / SLOWEST
        return await asyncio.wait_for(work, limit)

    future = asyncio.run_coroutine_threadsafe(bounded(), loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def md5_of(path: Path) -> bytes:
    """Return the MD5 digest of a file."""
    with io_errors(str(path)), open(path, "rb") as file:
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).digest()


def base64_md5(data: bytes) -> str:
    """Return the MD5 digest of bytes as HTTP spells it."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
