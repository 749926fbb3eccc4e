"""Buckets of remote storage: each request bounded in time, tried again, verified, and explained.

    open_bucket(url) -> Bucket -> the one loop of attempts -> Service of the scheme
    Bucket.get | head | list     -> bytes, Object, ...
    Bucket.put | delete          -> what arrived is what was sent; a file: `upload.upload`

The clients make one attempt a request; the one retry loop is here, around request and body, so that
a stalled store costs attempts x timeout and not the product of three loops. A request whose answer
was lost may have been done: whoever creates or completes looks before calling it a failure.

Also: trying again: bounded exponential backoff with full jitter, for what can fail in passing.

Also: the service of each scheme in this process: made once for what the environment says.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from olm_data import plugins
from olm_data.bounded_json import decode_object
from olm_data.errors import OlmError, UsageError, refuse_secrets, words
from olm_data.process_lock import ProcessLock
from olm_data.redaction import echoes
from olm_data.regular_files import refuse_large
from olm_data.storage import failures
from olm_data.storage import service as bounds
from olm_data.storage.objects import (
    SCHEMES,
    Object,
    RemoteFailure,
    Upload,
    options_for,
    other_bytes,
    scheme_of,
    split_url,
)
from olm_data.storage.service import (
    Condition,
    CredentialEcho,
    GetResult,
    OversizedAnswer,
    Refusal,
    Service,
)

_lock = ProcessLock()


def service(scheme: str, options: str = "") -> Service:
    """Return this process's service for a scheme, with what the environment says now.

    Args:
        options: for its client, as JSON (see `options`).

    Raises:
        MissingExtra: its package is not installed.
        RemoteFailure: it finds no credentials.
        UsageError: the settings are refused.
    """
    kind = _kind(scheme)
    names = sorted(name for name in list(os.environ) if name.startswith(kind.settings))
    said = tuple((name, os.environ.get(name)) for name in names)
    timeouts = (bounds.CONNECT_TIMEOUT, bounds.READ_TIMEOUT)
    with _lock.held():
        return _made(kind, scheme, options, os.getpid(), said, timeouts)


def _kind(scheme: str) -> type[Service]:
    if scheme == "s3":
        from olm_data.storage.s3 import S3

        return S3
    if scheme in ("memory", "hf"):
        from olm_data.storage import plain

        return plain.MemoryStore if scheme == "memory" else plain.Hub
    kind: type[Service] = plugins.load("olm_data.services", scheme)
    return kind


@lru_cache(maxsize=8)
def _made(
    kind: type[Service], scheme: str, options: str, pid: int, settings: object, timeouts: object
) -> Service:
    try:
        made = kind(scheme, decode_object(options.encode() or b"{}"))
    except (OlmError, ImportError):
        raise
    except Exception as error:
        raise UsageError(
            f"the client of {scheme}:// refuses its settings: {type(error).__name__}",
            why=words(str(error)) if isinstance(error, TypeError) else None,
            fix=f"check {kind.address}, {kind.login} and the storage options",
        ) from error

    def close() -> None:
        if os.getpid() == pid:
            made.close()

    atexit.register(close)
    return made


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How often to try, and how long to wait.

    Attributes:
        attempts: most attempts, the first one included.
        first: the longest wait before the second attempt, in seconds; each next one doubles.
        most: the longest wait, in seconds.
        within: no attempt starts later than this many seconds after the first one.
    """

    attempts: int = 10
    first: float = 0.2
    most: float = 20.0
    within: float = 300.0

    def longest(self, attempt: int) -> float:
        """Return the longest wait in seconds after attempt number `attempt` (1, 2, ...)."""
        return min(self.most, self.first * 2.0 ** (attempt - 1))


BACKOFF = Backoff()
FIRST_CONTACT = Backoff(attempts=6, within=60)  # see `Bucket.hasty`
PIECE = 8 << 20  # bytes of one ranged read

T = TypeVar("T")
Listed = TypeVar("Listed", Object, Upload)
_log = logging.getLogger(__name__)


class Bucket:
    """The objects of one bucket.

    Args:
        scheme: of its URLs.
        name: of the bucket or container.
        options: for its client, as JSON.
        hasty: before work starts: say within seconds that the store does not answer.

    Raises:
        RemoteFailure: from every call, where the store refused, or failed too often.
    """

    def __init__(self, scheme: str, name: str, options: str = "", *, hasty: bool = False) -> None:
        self.scheme, self.name, self.hasty, self._options = scheme, name, hasty, options

    @property
    def service(self) -> Service:
        """What its requests go by, in this process and now."""
        return service(self.scheme, self._options)

    def url(self, key: str) -> str:
        """Return `scheme://bucket/key`."""
        return f"{self.scheme}://{self.name}/{key}"

    def endpoint(self) -> str:
        """Return host and port that requests go to."""
        return failures.endpoint(self.service)

    def ask(
        self,
        operation: str,
        key: str,
        ask: Callable[[Service], T],
        *,
        stopped: threading.Event | None = None,
        backoff: Backoff | None = None,
    ) -> tuple[T, int]:
        """Make one request, again while its errors are transient; count the attempts.

        Args:
            operation: what is done, for messages.
            key: object or prefix the request is about.
            ask: makes it once, and reads the answer's body.
            stopped: once set, no further attempt is made.
            backoff: the bounds, if not the usual ones.

        Raises:
            FileNotFoundError: no such object.
            RemoteFailure: the store refused, or failed too often; names key and request id.
        """
        here, url = self.service, self.url(key)
        bounds = backoff or (FIRST_CONTACT if self.hasty else BACKOFF)
        begun, attempt, problem = time.monotonic(), 1, None
        while problem is None:
            try:
                return ask(here), attempt
            except Exception as error:
                seconds = time.monotonic() - begun
                wait = random.uniform(0, bounds.longest(attempt))
                over = attempt >= bounds.attempts or seconds + wait > bounds.within
                if over or not failures.is_transient(error) or (stopped and stopped.is_set()):
                    problem = failures.translated(here, error, url, operation, attempt)
                    if problem is None:  # not the store's doing
                        raise
                    continue
                if attempt > 1 or seconds > 5:  # a single hiccup is no news
                    said = failures.said(error)
                    _log.warning("%s: %s; trying again (%d)", url, said, attempt + 1)
            time.sleep(wait)
            attempt += 1
        # Outside the handler: the client's own error repeats what the store sent, and whoever
        # prints a chain of errors would print that.
        raise problem

    def head(self, key: str) -> Object | None:
        """Return what is known of an object, or None where there is none."""
        try:
            return self.ask("head_object", key, lambda here: here.head(self.name, key))[0]
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
                data, _, size = self.piece(key, start, end, etag=etag)
            except RemoteFailure as failure:
                if failure.code == "InvalidRange" or failure.status == 416:
                    break  # at or past the end
                raise
            if most is not None:
                refuse_large(size, most, self.url(key))
            parts.append(data)
            start += len(data)
            if start >= size:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pieces(self, key: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of one version of an object from `start` on in pieces of `size`.

        Raises:
            FileNotFoundError: no such object.
        """
        known = self.head(key)
        if known is None:
            raise FileNotFoundError(self.url(key))
        for place in range(start, known.size, size):
            yield self.get(key, place, min(known.size, place + size), etag=known.etag)

    def piece(self, key: str, start: int, stop: int, *, etag: str | None = None) -> GetResult:
        """Return bytes [start, stop) of an object by one answer, as `get`: with their version.

        Raises:
            RemoteFailure: 416 where it has no byte from `start` on.
        """

        def read(here: Service) -> GetResult:
            got = here.get(self.name, key, start, stop, etag or "")
            _refuse_false(got, start, stop, etag)
            return got

        return self.ask("get_object", key, read)[0]

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
        try:
            proved, _ = self.ask(
                "put_object", key, lambda here: here.put(self.name, key, data, condition)
            )
        except RemoteFailure as error:
            # Some stores say of a version to replace that it is not there.
            gone = replaces is not None and error.status == 404 and error.code != "NoSuchBucket"
            if condition is None or not (error.is_other_version or gone):
                raise
            # The answer to an earlier attempt may have been lost: then the object there is ours.
            if self._writer(key) != condition.writer:
                raise FileExistsError(self.url(key)) from error
            proved = False
        if not proved and self.get(key) != data:
            raise other_bytes(self.url(key))

    def _writer(self, key: str) -> str | None:
        try:
            return self.ask("head_object", key, lambda here: here.writer(self.name, key))[0]
        except FileNotFoundError:
            return None

    def begin(self, key: str, path: Path) -> Upload:
        """Begin an upload of a file in parts, for `abort`."""
        operation = "create_multipart_upload"
        begun = self.ask(operation, key, lambda here: here.begin(self.name, key, path))
        return Upload(key, begun[0], datetime.min)

    def abort(self, upload: Upload) -> None:
        """Give up an unfinished upload; its parts are deleted. One that is gone is no error."""
        try:
            self.ask(
                "abort_multipart_upload", upload.key, lambda here: here.abort(upload, self.name)
            )
        except RemoteFailure as error:
            if error.status != 404:
                raise

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the unfinished uploads of keys that begin with `prefix`, where a store has such."""
        operation = "list_multipart_uploads"
        found = self._pages(operation, prefix, lambda s, more: s.uploads(self.name, prefix, more))
        # Whatever the store makes of the prefix.
        yield from (upload for upload in found if upload.key.startswith(prefix))

    def list(self, prefix: str) -> Iterator[Object]:
        """Yield the objects whose keys begin with `prefix`, by key."""
        operation = "list_objects_v2"
        return self._pages(operation, prefix, lambda s, more: s.page(self.name, prefix, more))

    def _pages(
        self,
        operation: str,
        prefix: str,
        page: Callable[[Service, Any], tuple[Sequence[Listed], Any]],
    ) -> Iterator[Listed]:
        more: Any = None
        while True:

            def ask(here: Service, more: Any = more) -> tuple[Sequence[Listed], Any]:
                found, after = page(here, more)
                if echoes([item.key for item in found]):
                    raise CredentialEcho
                return found, after

            found, more = self.ask(operation, prefix, ask)[0]
            yield from found
            if not more:
                return

    def delete(self, key: str, *, etag: str = "") -> None:
        """Delete an object, only the version with this ETag if one is given.

        One that is not there is no error.

        Raises:
            FileExistsError: another version is there.
        """
        try:
            self.ask("delete_object", key, lambda here: here.delete(self.name, key, etag))
        except FileNotFoundError:
            return
        except RemoteFailure as error:
            if not etag or not error.is_other_version:
                raise
            # Some stores say so of one that is gone too; an earlier attempt may have removed it.
            if self.head(key) is not None:
                raise FileExistsError(self.url(key)) from error

    def now(self) -> datetime:
        """Return the store's own clock, by the date of an answer."""
        return self.ask("list_objects_v2", "", lambda here: here.now(self.name))[0]


def _refuse_false(got: GetResult, start: int, stop: int, etag: str | None) -> None:
    """Refuse what a store may answer that does not honour ranges or conditions, or echoes."""
    if etag and got.etag != etag:
        raise Refusal(412, "PreconditionFailed")
    if len(got.data) > stop - start:
        raise OversizedAnswer(f"more than {stop - start:,} bytes")
    if echoes(got.data):
        raise CredentialEcho
    if not got.data and start < got.size:  # whoever asks for the rest would ask for ever
        raise ConnectionError("no byte of the range came")


def open_bucket(url: str, *, hasty: bool = False) -> tuple[Bucket, str]:
    """Return the bucket of a URL, and the key in it. Nothing is asked of the store yet.

    Raises:
        UsageError: the URL holds credentials, names no bucket, or is of an unknown scheme.
    """
    refuse_secrets(url)
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        raise UsageError(
            f"storage at {scheme}:// is not supported",
            fix=f"use a local path or one of {', '.join(f'{name}://' for name in SCHEMES)}",
        )
    name, key = split_url(url)
    options = options_for(url)
    return Bucket(scheme, name, json.dumps(options) if options else "", hasty=hasty), key
