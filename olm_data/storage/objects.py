"""Objects of remote storage, whatever store keeps them: their URLs, what is known of one, failures.

scheme://bucket/key -> scheme_of, split_url -> `bucket.open_bucket`
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from olm_data.errors import StorageError, UsageError

WRITABLE = ("s3", "gs", "az", "abfs", "memory")
READ_ONLY = ("http", "https", "hf")
SCHEMES = (*WRITABLE, *READ_ONLY)
LOCATIONS = (*WRITABLE, "hf")
"""Where a mixture's sources may lie: `http://` would let a lock from elsewhere ask any machine."""


class Object(NamedTuple):
    """One object.

    Attributes:
        key: name in its bucket.
        size: in bytes.
        etag: names this version of it, without quotes; "" where the store tells none.
        modified: when it was last written.
    """

    key: str
    size: int
    etag: str
    modified: datetime


class Upload(NamedTuple):
    """One unfinished multipart upload."""

    key: str
    id: str
    started: datetime


class RemoteFailure(StorageError):
    """A request that the store refused, or that failed too often.

    Attributes:
        code: the store's error code ("" where no answer came).
        status: HTTP status (0 where no answer came).
        attempts: how often it was tried.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        code: str = "",
        status: int = 0,
        attempts: int = 1,
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.code, self.status, self.attempts = code, status, attempts

    @property
    def is_other_version(self) -> bool:
        """Whether a condition on the version of an object did not hold."""
        return self.status == 412 or self.code in ("PreconditionFailed", "412")


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, "" of a local path."""
    scheme, found, _ = url.partition("://")
    return scheme if found and scheme != "file" else ""


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and key (no leading or trailing slash) of `scheme://bucket/key`.

    Raises:
        UsageError: it names no bucket.
    """
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise UsageError(
            "the URL names no bucket", where=url, fix=f"write {scheme_of(url)}://BUCKET/PREFIX"
        )
    return bucket, key.strip("/")


def other_bytes(url: str) -> StorageError:
    """Return the error where what arrived is not what was sent."""
    return StorageError(
        "the store holds other bytes than were sent",
        where=url,
        fix="run the same command again; finished shards are kept",
    )
