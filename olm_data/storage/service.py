"""What a store is asked: one attempt at each request, as its own client makes it.

S3 | Google | Azure | Memory | Web | Hub -> Service <- bucket.Bucket: attempts, proofs, words
                                         -> Refusal, CredentialEcho, OversizedAnswer, ...
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from olm_data.errors import UsageError, words
from olm_data.storage.objects import Object, Options, Upload

CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 30.0  # seconds; sending has CONNECT_TIMEOUT for each block
WRITER = "olm-writer"
"""Metadata of a created object: tells ours from a rival's of the same bytes."""


class GetResult(NamedTuple):
    """The answer to a ranged read: bytes, version, and size of the whole object."""

    data: bytes
    etag: str
    size: int


class Condition(NamedTuple):
    """What must hold for a write.

    Attributes:
        replaces: the ETag of the version to take the place of; "" to create.
        writer: goes with the object, as its metadata `WRITER`.
    """

    replaces: str
    writer: str


class SentPart(NamedTuple):
    """A part that was sent: what the completion is told of it; whether it is proved to be there."""

    told: Any
    proved: bool


class Refusal(Exception):
    """What a store answered in place of what was asked for.

    Args:
        status: of HTTP; 412 where a condition does not hold.
        code: the store's own name for it, "" where it told none.
        message: its words.
        request: its id of the request.
    """

    def __init__(self, status: int, code: str = "", message: str = "", request: str = "") -> None:
        super().__init__(f"{status} {words(code)}".strip())
        self.status, self.code = status, words(code)
        self.message, self.request = words(message), words(request)


class CredentialEcho(Exception):
    """An answer repeats a credential of this machine: nothing of it may be kept or shown."""


class OversizedAnswer(Exception):
    """An answer has more bytes than were asked for, or than such an answer can have."""


class Service(ABC):
    """One attempt at each request to a store.

    Methods raise `Refusal`, FileNotFoundError where there is no such object, `CredentialEcho`,
    `OversizedAnswer`, and what the client raises where no whole answer came.

    Attributes:
        settings: start of the names of environment variables it depends on.
        address, login: what the user checks where it is not reached, or refuses.
        own_address: what the user does where it redirects.
        parts_at_a_time: of a large file, each tried again alone; 1: in order, and the last one
            makes the object visible; 0: files are sent whole.
    """

    settings: tuple[str, ...] = ()
    address = "the address"
    login = "the credentials"
    own_address = "give the store's own address"
    parts_at_a_time = 0

    def __init__(self, scheme: str, options: Options) -> None:
        self._scheme = scheme

    @abstractmethod
    def endpoint(self) -> str:
        """Return the address that requests go to."""

    @abstractmethod
    def head(self, bucket: str, key: str) -> Object:
        """Return what is known of an object."""

    @abstractmethod
    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> GetResult:
        """Read a range of any version, or of the one that `etag` names."""

    @abstractmethod
    def page(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        """Return objects of a listing from `more` on (None: the start), and where to go on."""

    def put(self, bucket: str, key: str, data: bytes, condition: Condition | None) -> bool:
        """Write an object. Returns whether it is proved that these bytes arrived."""
        raise _read_only()

    def put_file(self, bucket: str, key: str, path: Path) -> bool:
        """Write a file as an object, as `put`; by default by one, with its bytes in memory."""
        return self.put(bucket, key, path.read_bytes(), None)

    def writer(self, bucket: str, key: str) -> str | None:
        """Return an object's metadata `WRITER`."""
        return None

    def delete(self, bucket: str, key: str, etag: str) -> None:
        """Delete any version of an object, or the one that `etag` names."""
        raise _read_only()

    def now(self, bucket: str) -> datetime:
        """Return the store's own clock; this machine's where it tells none."""
        return datetime.now(UTC)

    def begin(self, bucket: str, key: str, path: Path) -> str:
        """Begin an upload of a file in parts; return its id."""
        raise NotImplementedError

    def send(self, upload: Upload, bucket: str, number: int, body: FileSlice) -> SentPart:
        """Send part `number` (from 1) of an upload; again replaces it."""
        raise NotImplementedError

    def complete(self, upload: Upload, bucket: str, parts: Sequence[Any]) -> None:
        """Make an upload visible; `parts`: `told` of each."""
        raise NotImplementedError

    def abort(self, upload: Upload, bucket: str) -> None:  # noqa: B027
        """Give up an upload; where a store cannot, it drops the parts in time."""

    def uploads(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Upload], Any]:
        """Return unfinished uploads, as `page`; none where the store does not list them."""
        return (), None

    def advice(self, refusal: Refusal, operation: str) -> tuple[str, str] | None:
        """Return why a store refuses and what helps, where only this kind of store does so."""
        return None

    def close(self) -> None:  # noqa: B027
        """Close its connections."""


def _read_only() -> UsageError:
    return UsageError("this storage can only be read", fix="choose another output")


def base64_md5(data: bytes) -> str:
    """Return the MD5 digest of bytes as HTTP spells it."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


_AT_ONCE = 1 << 20  # bytes; by itself Python takes 8 KiB


class Seekable(io.RawIOBase):
    """A stream of `_size` bytes to read, whose position is `_at`: what every such stream has."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, (0, self._at, self._size)[whence] + offset)
        return self._at


class FileSlice(Seekable):
    """Bytes [start, stop) of an open file, read at positions of its own: no copy, any thread."""

    def __init__(self, handle: int, start: int, stop: int) -> None:
        super().__init__(stop - start)
        self._handle = handle
        self.start, self.stop = start, stop

    @property
    def whole(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._handle).st_size

    def readall(self) -> bytes:
        return b"".join(iter(partial(self.read, _AT_ONCE), b""))

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = view[: max(0, min(len(view), self._size - self._at))]
        count = os.preadv(self._handle, [wanted], self.start + self._at)
        self._at += count
        return count
