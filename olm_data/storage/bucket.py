"""Buckets of remote storage: each request bounded in time, tried again, verified, and explained.

    Bucket.get | head | list                -> bytes, Object, ...
    Bucket.put | upload | delete            -> what arrived is what was sent

The clients make one attempt a request; the one retry loop is here, around request and body, so that
a stalled store costs attempts x timeout and not the product of three loops. A request whose answer
was lost may have been done: whoever creates looks before calling it a conflict.
Never: an open-for-write handle, a credential in a message, another prefix than the caller's.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from olm_data.errors import StorageError
from olm_data.regular_files import refuse_large
from olm_data.storage.objects import (
    Object,
    RemoteFailure,
    Upload,
)
from olm_data.storage.retry import Backoff, retried

BACKOFF = Backoff()
FIRST_CONTACT = Backoff(attempts=6, within=60)  # see `Bucket.hasty`
PIECE = 8 << 20  # bytes of one ranged read
WRITER = "olm-writer"
"""Metadata of a created object: tells ours from a rival's of the same bytes."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Got(NamedTuple):
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


class Bucket(ABC):
    """The objects of one bucket.

    A store says in `_head` to `_now` how one attempt is made, and in `_transient` to `_translated`
    what an error of its client means.

    Args:
        scheme: of its URLs.
        name: of the bucket or container.
        hasty: before work starts: say within seconds that the store does not answer.

    Raises:
        RemoteFailure: from every call, where the store refused, or failed too often.
    """

    def __init__(self, scheme: str, name: str, *, hasty: bool = False) -> None:
        self.scheme, self.name, self.hasty = scheme, name, hasty

    def url(self, key: str) -> str:
        """Return `scheme://bucket/key`."""
        return f"{self.scheme}://{self.name}/{key}"

    def attempts(
        self,
        operation: str,
        key: str,
        attempt: Callable[[], T],
        *,
        stopped: threading.Event | None = None,
        backoff: Backoff | None = None,
    ) -> tuple[T, int]:
        """Make one request, again while its errors are transient; count the attempts.

        Args:
            operation: what is done, for messages.
            key: object or prefix the request is about.
            attempt: makes it once, and reads the answer's body.
            stopped: once set, no further attempt is made.
            backoff: the bounds, if not the usual ones.

        Raises:
            FileNotFoundError: no such object.
            FileExistsError: a condition does not hold.
            RemoteFailure: the store refused, or failed too often; names key and request id.
        """
        url, tries = self.url(key), [1]

        def numbered(number: int) -> T:
            tries[0] = number
            return attempt()

        def again(error: Exception) -> bool:
            return self._transient(error) and not (stopped is not None and stopped.is_set())

        def failed(error: Exception, number: int, seconds: float) -> None:
            if number > 1 or seconds > 5:  # a single hiccup is no news
                _log.warning("%s: %s; trying again (%d)", url, self._said(error), number + 1)

        try:
            bounds = backoff or (FIRST_CONTACT if self.hasty else BACKOFF)
            return retried(numbered, bounds, again, failed), tries[0]
        except Exception as error:
            problem = self._translated(error, url, operation, tries[0])
            if problem is None:  # not the store's doing
                raise
        # Outside the handler: the client's own error repeats what the store sent, and whoever
        # prints a chain of errors would print that.
        raise problem

    def head(self, key: str) -> Object | None:
        """Return what is known of an object, or None where there is none."""
        try:
            return self.attempts("head_object", key, partial(self._head, key))[0]
        except FileNotFoundError:
            return None

    def get(
        self,
        key: str,
        start: int = 0,
        stop: int | None = None,
        *,
        etag: str | None = None,
        most: int | None = None,
    ) -> bytes:
        """Return bytes [start, stop) of an object, as many of them as it has.

        Args:
            etag: refuse any other version of the object.
            most: bytes that the object may have.

        Raises:
            FileNotFoundError: no such object.
            ValidationError: it has more than `most`.
            RemoteFailure: `is_other_version` where the object is another version.
        """
        parts: list[bytes] = []
        while stop is None or start < stop:
            end = start + PIECE if stop is None else min(stop, start + PIECE)
            try:
                ask = partial(self._get, key, start, end, etag or "")
                data, etag, size = self.attempts("get_object", key, ask)[0]
            except RemoteFailure as failure:
                if failure.code in ("InvalidRange", "416") or failure.status == 416:
                    break  # at or past the end
                raise
            if most is not None:
                refuse_large(size, most, self.url(key))
            parts.append(data)
            start += len(data)
            if start >= size:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def put(
        self, key: str, data: bytes, *, create: bool = False, replaces: str | None = None
    ) -> None:
        """Write a small object whole, and check what arrived.

        Args:
            create: only where there is none; else FileExistsError.
            replaces: only in place of the version with this ETag; else FileExistsError.

        Raises:
            FileExistsError: the condition does not hold.
        """
        condition = None
        if create or replaces is not None:
            condition = Condition("" if create else str(replaces), uuid.uuid4().hex)
        write = partial(self._put, key, data, condition)
        try:
            proved, _ = self.attempts("put_object", key, write)
        except (FileExistsError, RemoteFailure) as error:
            known = isinstance(error, FileExistsError) or error.is_other_version
            if condition is None or not known:
                raise
            # The answer to an earlier attempt may have been lost: then the object there is ours.
            if self._writer_of(key) != condition.writer:
                raise FileExistsError(self.url(key)) from error
            proved = False
        if not proved and self.get(key) != data:
            raise self._other_bytes(key)

    @abstractmethod
    def upload(self, key: str, path: Path, sha256: str) -> None:
        """Write a local file as an object, in parts if it is large, and check what arrived.

        Args:
            sha256: digest of the file.

        Raises:
            RemoteFailure: nothing new is visible then, and no part is left behind.
        """

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""
        with contextlib.suppress(FileNotFoundError):
            self.attempts("delete_object", key, partial(self._delete, key))

    def list(self, prefix: str) -> Iterator[Object]:
        """Yield the objects whose keys begin with `prefix`, by key."""
        more: Any = None
        while True:
            ask = partial(self._page, prefix, more)
            found, more = self.attempts("list_objects_v2", prefix, ask)[0]
            yield from found
            if not more:
                return

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the unfinished uploads of keys that begin with `prefix`, where a store has such."""
        yield from ()

    def abort(self, upload: Upload) -> None:
        """Give up an unfinished upload; its parts are deleted. One that is gone is no error."""
        raise NotImplementedError

    def now(self) -> datetime:
        """Return the store's own clock, by the date of an answer."""
        return self.attempts("list_objects_v2", "", self._now)[0]

    @abstractmethod
    def endpoint(self) -> str:
        """Return host and port that requests go to."""

    @abstractmethod
    def _head(self, key: str) -> Object:
        """Return what is known of an object. Raises: FileNotFoundError."""

    @abstractmethod
    def _get(self, key: str, start: int, stop: int, etag: str) -> Got:
        """Read a range of any version, or only of the one with this ETag."""

    @abstractmethod
    def _put(self, key: str, data: bytes, condition: Condition | None) -> bool:
        """Write an object. Returns whether the store's answer proves that these bytes arrived."""

    @abstractmethod
    def _writer(self, key: str) -> str | None:
        """Return an object's metadata `WRITER`."""

    @abstractmethod
    def _page(self, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        """Return objects of a listing from `more` on (None: the start), and where to go on."""

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Delete an object."""

    @abstractmethod
    def _now(self) -> datetime:
        """Return the date of an answer."""

    @abstractmethod
    def _transient(self, error: Exception) -> bool:
        """Whether the same request may succeed a moment later."""

    @abstractmethod
    def _said(self, error: Exception) -> str:
        """Return an error in a few words."""

    @abstractmethod
    def _translated(
        self, error: Exception, url: str, operation: str, attempts: int
    ) -> Exception | None:
        """Return the error to raise instead of the client's; None where it is not of the client."""

    def _writer_of(self, key: str) -> str | None:
        try:
            return self.attempts("head_object", key, partial(self._writer, key))[0]
        except FileNotFoundError:
            return None

    def _reads_back(self, key: str, size: int, sha256: str) -> bool:
        """Whether the object has this digest; for stores whose ETag proves nothing."""
        found = self.head(key)
        if found is None or found.size != size:
            return False
        seen = hashlib.sha256()
        for start in range(0, size, PIECE):
            seen.update(self.get(key, start, min(size, start + PIECE), etag=found.etag))
        return seen.hexdigest() == sha256

    def _other_bytes(self, key: str) -> StorageError:
        return StorageError(
            "the store holds other bytes than were sent",
            where=self.url(key),
            fix="run the same command again; finished shards are kept",
        )
