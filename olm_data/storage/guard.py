"""What stands between a client of aiohttp and the network, whatever the server answers.

    request -> sent -> a redirect: refused
                    -> a body: read up to what was asked for, or up to a limit

Never: a request to another host than the one it was signed for; the same request twice; more of an
answer in memory than its limit, whatever length the server claims or sends.
"""

from __future__ import annotations

import re
from typing import Any

MOST_ERROR = 1 << 20
"""Bytes of an error's body; a real one has about 500."""
MOST_ANSWER = 8 << 20
"""Bytes of any other body that is not an object; 1,000 entries of a listing have 2 MB."""
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CHUNK = 1 << 20


class CredentialEcho(Exception):
    """An answer repeats a credential of this machine: nothing of it may be kept or shown."""


class OversizedAnswer(Exception):
    """An answer has more bytes than were asked for, or than such an answer can have."""


class Redirected(Exception):
    """An answer sends the client to another address, which would get what this one is given."""

    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


async def guarded(request: Any, handler: Any) -> Any:
    """Send a request: a middleware of aiohttp.

    Raises:
        OversizedAnswer: from reading the body.
        Redirected: the answer is a redirect.
    """
    answer = await bounded(request, handler)
    if 300 <= answer.status < 400 and "Location" in answer.headers:
        answer.close()
        raise Redirected(answer.status)
    return answer


async def bounded(request: Any, handler: Any) -> Any:
    """Send a request, where a redirect gives nothing away: a middleware of aiohttp.

    Raises:
        OversizedAnswer: from reading the body.
    """
    answer = await handler(request)
    asked = _RANGE.fullmatch(request.headers.get("x-ms-range") or request.headers.get("Range", ""))
    most = MOST_ERROR if answer.status >= 400 else MOST_ANSWER
    if asked and answer.status < 300:
        most = int(asked[2]) - int(asked[1]) + 1
    answer.content = _Bounded(answer, answer.content, most)
    return answer


def one_attempt(session: Any) -> Any:
    """Return a session that sends each request once.

    By itself aiohttp sends those it takes for idempotent again where a connection it kept breaks;
    a create that was done the first time would seem to be refused.
    """
    session._retry_connection = False
    return session


class _Bounded:
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
