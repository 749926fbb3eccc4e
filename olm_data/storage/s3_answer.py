"""What a store's answers say, as values: objects, uploads, pages of listings, bodies, dates.

A field that is missing or of another kind is a `KeyError` or `ValueError` here, which
`s3_errors.translated` explains: a store that answers nonsense is no defect of this program.
"""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from olm_data.redaction import echoes
from olm_data.storage.bucket import Got
from olm_data.storage.objects import Object, Upload

_AT_ONCE = 1 << 20


class CredentialEcho(Exception):
    """An answer repeats a credential of this machine: nothing of it may be kept or shown."""


class OversizedAnswer(Exception):
    """An answer has more bytes than were asked for, or than such an answer can have."""


def etag_of(found: Any) -> str:
    """Return the ETag without quotes, "" where there is none."""
    return str(found.get("ETag", "")).strip('"')


def object_of(key: str, found: Any, size: str = "ContentLength") -> Object:
    """Read what is told of an object; `size` names the field with its bytes."""
    return Object(key, found[size], etag_of(found), found["LastModified"])


def page_of(page: Any) -> tuple[list[Object], dict[str, Any]]:
    """Read a page of a listing: objects, and the parameters of the next page, if there is one."""
    found = [object_of(item["Key"], item, "Size") for item in page.get("Contents", ())]
    return found, _next_page(page, "ContinuationToken")


def page_of_uploads(page: Any) -> tuple[list[Upload], dict[str, Any]]:
    """Read a page of unfinished uploads, as `page_of`."""
    found = [Upload(i["Key"], i["UploadId"], i["Initiated"]) for i in page.get("Uploads", ())]
    return found, _next_page(page, "KeyMarker", "UploadIdMarker")


def _next_page(page: Any, *names: str) -> dict[str, Any]:
    return {name: page[f"Next{name}"] for name in names} if page.get("IsTruncated") else {}


def body_of(response: Any, most: int) -> Got:
    """Read the answer to a ranged get: data, ETag, size of the whole object.

    Args:
        most: bytes that were asked for.

    Raises:
        CredentialEcho: the data holds a credential of this machine.
        OversizedAnswer: the store sends more than `most` bytes.
        IncompleteReadError: it sends nothing of an object that is not empty.
    """
    with response["Body"] as stream:
        data = read_up_to(stream, most)
    if echoes(data):
        raise CredentialEcho
    total = response.get("ContentRange", "").rpartition("/")[2]
    size = int(total) if total.isdigit() else len(data)
    if size and not data:  # whoever asks for the rest would ask for ever
        from botocore.exceptions import IncompleteReadError

        raise IncompleteReadError(actual_bytes=0, expected_bytes=min(size, most))
    return Got(data, etag_of(response), size)


def read_up_to(stream: Any, most: int) -> bytes:
    """Return all that a stream holds.

    Raises:
        OversizedAnswer: it holds more than `most` bytes; it is closed then.
    """
    parts, left = [], most + 1
    while left and (data := stream.read(min(left, _AT_ONCE))):
        parts.append(data)
        left -= len(data)
    if not left:
        stream.close()
        raise OversizedAnswer(f"more than {most:,} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def date_of(answer: Any) -> datetime:
    """Return the store's own clock at the time of an answer."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
