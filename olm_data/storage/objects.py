"""Objects of remote storage, whatever store keeps them: their URLs, what is known of one, failures.

scheme://bucket/key -> scheme_of, split_url -> `bucket.open_bucket`

Also: what clients of stores are told beside the environment: the `storage_options` of fsspec's
users.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from olm_data.errors import ConflictError, StorageError, UsageError, printable
from olm_data.redaction import hold

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
        self, what: str, *, code: str = "", status: int = 0, attempts: int = 1, **parts: str | None
    ) -> None:
        super().__init__(what, **parts)
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


def conflict(
    what: str,
    where: str,
    fix: str = "run the command again: it starts from what is there now",
) -> ConflictError:
    """Return the error where another process has written a file."""
    why = "two writers on one output would lose one of the two results"
    return ConflictError(what, where=where, why=why, fix=fix)


Options = Mapping[str, Any]
"""Arguments of another project's file system, by name; or such by the start of URLs."""
VARIABLE = "OLM_STORAGE_OPTIONS"
CLOUDS = ("s3", "gs", "az", "abfs")
"""Schemes whose clients take options."""
_SECRET = re.compile(r"key|secret|token|sas|password|credential|connection|authorization", re.I)


def parse_options(texts: Sequence[str]) -> Options:
    """Return the options that words of a command line spell: JSON, or KEY=VALUE.

    Raises:
        UsageError: they spell none; what they hold is not repeated.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, assigned, value = text.partition("=")
        if text.startswith("{"):
            found |= _decoded(text, "--storage-options")
        elif assigned and re.fullmatch(r"[a-z][a-z0-9_]*", name):
            found[name] = {"true": True, "false": False}.get(value, value)
        else:
            raise _refused("it is neither KEY=VALUE nor JSON", "--storage-options")
    return found


def use_options(options: Options, *, instead: bool = True) -> None:
    """Let this process, and those that it starts from now on, use options.

    Args:
        options: of all URLs, or by the start of URLs.
        instead: of what was said before for the same URLs; else that stays.

    Raises:
        UsageError: they are mixed, or for URLs that take none.
    """
    if not options:
        return
    starts = {name for name in options if "://" in str(name)}
    if starts and len(starts) < len(options):
        raise _refused("options of all URLs, and options by URL, are mixed", "storage_options")
    new: dict[str, Any] = dict(options) if starts else {"": dict(options)}
    for start, own in new.items():
        if start and scheme_of(start) not in CLOUDS:
            raise _refused(f"{printable(scheme_of(start))}:// takes none", "storage_options")
        if not isinstance(own, Mapping):
            raise _refused("what stands beside a URL is no mapping", "storage_options")
    before = _known(os.environ.get(VARIABLE, ""))
    try:
        said = json.dumps(before | new if instead else new | before, sort_keys=True)
    except TypeError:
        raise _refused("an object is among them, and workers could not get it", VARIABLE) from None
    _known(said)
    os.environ[VARIABLE] = said


def options_for(url: str) -> Options:
    """Return the options of a URL.

    Raises:
        UsageError: what the environment holds is no JSON of options.
    """
    if scheme_of(url) not in CLOUDS:
        return {}
    known = _known(os.environ.get(VARIABLE, ""))
    fit = [start for start in known if f"{url.rstrip('/')}/".startswith(_whole(start))]
    return dict(known[max(fit, key=len)]) if fit else {}


def _whole(start: str) -> str:
    return start if not start or start.endswith("/") else f"{start}/"


@lru_cache(maxsize=8)
def _known(text: str) -> dict[str, Any]:
    """Return options by URL; what is secret of them becomes known to the redaction."""
    found = _decoded(text, VARIABLE) if text else {}
    if found and not any("://" in start or not start for start in found):
        found = {"": found}
    hold(*_secrets(found, ""))
    return found


def _secrets(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _secrets(part, f"{name} {key}" if _SECRET.search(name) else str(key))
    elif isinstance(value, str) and _SECRET.search(name):
        yield value


def _decoded(text: str, where: str) -> dict[str, Any]:
    from olm_data.bounded_json import decode_object  # it needs numpy, which a fork server must not

    try:
        return decode_object(text.encode())
    except ValueError:
        raise _refused("it is no JSON object", where) from None


def _refused(why: str, where: str) -> UsageError:
    return UsageError(
        "the storage options cannot be used",
        where=where,
        why=why,
        fix="""write profile=lab, or '{"s3://raw": {"endpoint_url": "https://..."}}'""",
    )
