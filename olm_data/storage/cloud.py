"""Buckets over the file systems of fsspec: one loop of attempts, verified uploads, conditions.

    CloudBucket -> Service of the scheme -> gcsfs | adlfs | memory | http | hf
                <- Refusal, connection error, ... -> RemoteFailure

A service is made anew in each process, for a file system of fsspec does not outlive a fork. A file
that is sent in parts is sent again whole where a part fails.
Never: a service that another process made.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from olm_data.errors import OlmError, UsageError
from olm_data.redaction import echoes
from olm_data.storage import bucket as under
from olm_data.storage import service as settings
from olm_data.storage.bucket import Bucket, Condition, Got
from olm_data.storage.guard import CredentialEcho, OversizedAnswer, Redirected
from olm_data.storage.objects import Object, RemoteFailure
from olm_data.storage.service import Refusal, Service, is_connection

WITHIN = 6 * 3600.0
"""Seconds after which no attempt to send a file starts."""
_FINAL = (501, 505)


class CloudBucket(Bucket):
    """The objects of a bucket behind a file system of fsspec; see `Bucket`."""

    def upload(self, key: str, path: Path, sha256: str) -> None:
        size = path.stat().st_size
        bounds = None if self.hasty else replace(under.BACKOFF, within=WITHIN)
        send = partial(self._service.put_file, self.name, key, path)
        proved, _ = self.attempts("put_object", key, send, backoff=bounds)
        if not proved and not self._reads_back(key, size, sha256):
            self.delete(key)
            raise self._other_bytes(key)

    def endpoint(self) -> str:
        address = urlsplit(self._service.endpoint())
        return f"{address.hostname}:{address.port}" if address.port else str(address.hostname)

    @property
    def _service(self) -> Service:
        return service(self.scheme)

    def _head(self, key: str) -> Object:
        return self._service.head(self.name, key)

    def _get(self, key: str, start: int, stop: int, etag: str) -> Got:
        got = self._service.get(self.name, key, start, stop, etag)
        if etag and got.etag != etag:  # whatever the store makes of the condition
            raise Refusal(412, "PreconditionFailed")
        if len(got.data) > stop - start:
            raise OversizedAnswer(f"more than {stop - start:,} bytes")
        if echoes(got.data):
            raise CredentialEcho
        if got.size and not got.data and start < got.size:
            raise ConnectionError("no byte of the range came")
        return got

    def _put(self, key: str, data: bytes, condition: Condition | None) -> bool:
        return self._service.put(self.name, key, data, condition)

    def _writer(self, key: str) -> str | None:
        return self._service.writer(self.name, key)

    def _page(self, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        found, after = self._service.page(self.name, prefix, more)
        if echoes([item.key for item in found]):
            raise CredentialEcho
        return found, after

    def _delete(self, key: str) -> None:
        self._service.delete(self.name, key)

    def _now(self) -> datetime:
        return self._service.now(self.name)

    def _transient(self, error: Exception) -> bool:
        if isinstance(error, OlmError):
            return False
        refusal = self._service.refusal(error)
        if refusal is not None:
            status = refusal.status
            return status in (408, 429) or (status >= 500 and status not in _FINAL)
        return is_connection(error)

    def _said(self, error: Exception) -> str:
        refusal = self._service.refusal(error)
        if refusal is not None:
            return f"the store answered {refusal}"
        if "Timeout" in type(error).__name__:
            return f"no answer in time ({type(error).__name__})"
        return f"the connection failed ({type(error).__name__})"

    def _translated(
        self, error: Exception, url: str, operation: str, attempts: int
    ) -> Exception | None:
        if isinstance(error, OlmError):
            return None
        if isinstance(error, FileExistsError):
            if operation != "get_object":
                return None
            error = Refusal(412, "PreconditionFailed")
        here, where = self._service, f"{url} ({operation})"
        if isinstance(error, FileNotFoundError):
            if operation in ("get_object", "head_object", "delete_object"):
                return FileNotFoundError(url)
            error = Refusal(404)
        refusal = here.refusal(error)
        if refusal is not None:
            return self._refused(refusal, where, attempts)
        if isinstance(error, CredentialEcho):
            return RemoteFailure(
                "the store's answer repeats a credential of this machine",
                where=where,
                why="no store needs to, and whatever is made of the answer would hold the "
                "credential",
                fix=f"check {here.address}; if it is not yours, replace the credential",
            )
        if isinstance(error, OversizedAnswer):
            return RemoteFailure(
                f"the store sends {error}: it does not honour ranges, or its answers have no end",
                where=where,
                why=f"the rest was not read; endpoint {self.endpoint()}",
                fix=f"check {here.address}",
            )
        if isinstance(error, Redirected):
            return RemoteFailure(
                f"the store redirects to another address: {error.status}",
                where=where,
                why="a redirect is not followed: the next host would get what this one is given",
                fix=f"give the store's own address: {here.address}",
                status=error.status,
            )
        if is_connection(error):
            times = f" {attempts} times" if attempts > 1 else ""
            return RemoteFailure(
                f"remote storage fails{times}: {self._said(error)}",
                where=where,
                why=f"endpoint {self.endpoint()}",
                fix=f"check the network and {here.address}, then run the same command again; "
                "finished work is kept",
                attempts=attempts,
            )
        if isinstance(error, LookupError | ValueError | TypeError | AttributeError):
            return RemoteFailure(
                "the store's answer cannot be read",
                where=where,
                why=f"{type(error).__name__}; endpoint {self.endpoint()}",
                fix=f"check {here.address}",
            )
        return None

    def _refused(self, refusal: Refusal, where: str, attempts: int) -> RemoteFailure:
        times = f" {attempts} times" if attempts > 1 else ""
        what, why = f"remote storage refused{times}: {refusal}", refusal.message or None
        fix = "run the same command again; finished work is kept"
        if refusal.status == 404:
            what = f"the bucket does not exist: {refusal}"
            fix = "create it first, or choose another output"
        elif refusal.status in (401, 403):
            fix = f"check {self._service.login} and what they are allowed to do"
        if refusal.request:
            where = f"{where.removesuffix(')')}, request id {refusal.request})"
        return RemoteFailure(
            what,
            where=where,
            why=why,
            fix=fix,
            code=refusal.code,
            status=refusal.status,
            attempts=attempts,
        )


def service(scheme: str) -> Service:
    """Return this process's service for a scheme, with what the environment says now.

    Raises:
        MissingExtra: its package is not installed.
        UsageError: the settings are refused.
    """
    kind = _kind(scheme)
    said = {k: v for k, v in os.environ.items() if k.startswith(kind.settings)}
    timeouts = (settings.CONNECT_TIMEOUT, settings.READ_TIMEOUT)
    return _made(kind, scheme, os.getpid(), tuple(sorted(said.items())), timeouts)


def _kind(scheme: str) -> type[Service]:
    if scheme == "gs":
        from olm_data.storage.gcs import Google

        return Google
    if scheme in ("az", "abfs"):
        from olm_data.storage.azure import Azure

        return Azure
    from olm_data.storage import plain

    return {"memory": plain.Memory, "hf": plain.Hub}.get(scheme, plain.Web)


@lru_cache(maxsize=8)
def _made(
    kind: type[Service], scheme: str, pid: int, settings: object, timeouts: object
) -> Service:
    try:
        made = kind(scheme)
    except (OlmError, ImportError):
        raise
    except Exception as error:
        raise UsageError(
            f"the client of {scheme}:// refuses its settings: {type(error).__name__}",
            fix=f"check {kind.address} and {kind.login}",
        ) from error

    def close() -> None:
        if os.getpid() == pid:
            made.close()

    atexit.register(close)
    return made
