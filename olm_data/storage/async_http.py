"""Clients over aiohttp: the loop they run in, and what stands between them and the network.

    request -> run, in this process's loop -> sent -> a redirect: refused
                                                   -> a body: read up to what was asked for

Whoever is interrupted cancels the request: nothing goes on behind an exception.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import threading
from collections.abc import Coroutine
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from olm_data.storage import service
from olm_data.storage.service import OversizedAnswer, Refusal

SLOWEST = 50_000
"""Bytes a second that sending a body takes at least; else it is given up."""
MOST_ERROR = 1 << 20
"""Bytes of an error's body; a real one has about 500."""
MOST_ANSWER = 8 << 20
"""Bytes of any other body that is not an object; 1,000 entries of a listing have 2 MB."""
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CHUNK = 1 << 20
T = TypeVar("T")
_log = logging.getLogger(__name__)


async def guarded(request: Any, handler: Any) -> Any:
    """Send a request: a middleware of aiohttp.

    Raises:
        OversizedAnswer: from reading the body.
        Refusal: the answer is a redirect.
    """
    answer = await bounded(request, handler)
    if 300 <= answer.status < 400 and "Location" in answer.headers:
        answer.close()
        raise Refusal(answer.status)
    return answer


async def bounded(request: Any, handler: Any) -> Any:
    """Send a request, where a redirect gives nothing away: a middleware of aiohttp.

    Raises:
        OversizedAnswer: from reading the body.
    """
    answer = await handler(request)
    asked = _RANGE.fullmatch(request.headers.get("x-ms-range") or request.headers.get("Range", ""))
    most = MOST_ERROR if answer.status >= 300 else MOST_ANSWER
    if asked and answer.status < 300:
        most = int(asked[2]) - int(asked[1]) + 1
    answer.content = BoundedBody(answer, answer.content, most)
    return answer


def one_attempt(session: Any) -> Any:
    """Return a session that sends each request once.

    By itself aiohttp sends those it takes for idempotent again where a connection it kept breaks;
    a create that was done the first time would seem to be refused.
    """
    session._retry_connection = False
    return session


class BoundedBody:
    """A stream of aiohttp's that gives up to `most` bytes.

    Args:
        answer: whose body it is.
        stream: to read.
        most: bytes.
    """

    def __init__(self, answer: Any, stream: Any, most: int) -> None:
        self._answer, self._stream, self._most, self._left = answer, stream, most, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, n: int = -1) -> bytes:
        """Return `n` bytes, or all by default, as aiohttp's stream."""
        if n >= 0:
            return self._counted(await self._stream.read(n))
        parts = []
        while part := await self._stream.read(_CHUNK):
            parts.append(self._counted(part))
        return b"".join(parts)

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            self._answer.close()
            raise OversizedAnswer(f"more than {self._most:,} bytes")
        return data


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


class Sending(io.BytesIO):
    """A body whose blocks, as they go out, put off the end of `run`; it is nowhere in memory whole.

    Of this type, as aiohttp reads any other file in threads.

    Args:
        body: to read and seek in.
        size: of it, in bytes.
    """

    clock: asyncio.Timeout | None = None

    def __init__(self, body: io.RawIOBase, size: int) -> None:
        super().__init__()
        self._body, self._bytes = body, size

    def getbuffer(self) -> memoryview:
        return np.broadcast_to(np.uint8(0), self._bytes).data  # for its length only

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._body.seek(offset, whence)

    def tell(self) -> int:
        return self._body.tell()

    def read(self, size: int | None = -1) -> bytes:
        data = self._body.read(-1 if size is None else size) or b""
        if self.clock is not None:
            last = self.tell() >= self._bytes  # then comes the answer
            wait = service.CONNECT_TIMEOUT + service.READ_TIMEOUT * last
            self.clock.reschedule(asyncio.get_running_loop().time() + wait)
        return data


def run(loop: Any, work: Coroutine[Any, Any, T], sends: int | Sending | None = None) -> T:
    """Return what a coroutine returns; it is cancelled where this is interrupted.

    `fsspec.asyn.sync` would let it go on: an upload would appear after the exception.

    Args:
        loop: of the file system, in its thread.
        sends: its body, or bytes of it; it is given up where they go out too slowly.
    """

    async def bounded() -> T:
        bytes = sends if isinstance(sends, int) else 0
        parts = 1 + bytes // (1 << 20)
        limit = service.CONNECT_TIMEOUT + service.READ_TIMEOUT * parts + bytes / SLOWEST
        async with asyncio.timeout(limit) as clock:
            if isinstance(sends, Sending):
                sends.clock = clock
            return await work

    future = asyncio.run_coroutine_threadsafe(bounded(), loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
