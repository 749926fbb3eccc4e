"""S3 through AWS's own client, and uploads in parts whose parts are tried again one by one.

    file -> parts, four at a time, each tried again and checked -> completed | aborted

A completion whose answer was lost may have been done: it looks before it calls that a failure.
Never: a part that stays behind an error, an interrupt included.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from olm_data.errors import StorageError
from olm_data.storage.bucket import WRITER, Bucket, Condition, Got
from olm_data.storage.objects import Object, RemoteFailure, Upload
from olm_data.storage.s3_answer import (
    body_of,
    date_of,
    etag_of,
    object_of,
    page_of,
    page_of_uploads,
)
from olm_data.storage.s3_body import Slice, digests
from olm_data.storage.s3_client import client, endpoint
from olm_data.storage.s3_errors import is_transient, said, translated

SMALLEST_PART, MOST_PARTS = 16 << 20, 9000
PARTS_AT_A_TIME = 4
_log = logging.getLogger(__name__)


class S3Bucket(Bucket):
    """The objects of one bucket.

    Args:
        name: bucket.
        hasty: before work starts: say within seconds that the store does not answer.
    """

    def __init__(self, name: str, *, hasty: bool = False) -> None:
        super().__init__("s3", name, hasty=hasty)

    def request(
        self,
        operation: str,
        key: str,
        *,
        body: Callable[[], Any] | None = None,
        then: Callable[[Any], Any] = lambda response: response,
        stopped: threading.Event | None = None,
        **parameters: Any,
    ) -> Any:
        """Make one request of the client, again while its errors are transient.

        Args:
            operation: name of the client's method.
            key: object or prefix the request is about, for messages.
            body: makes the body, afresh for each attempt.
            then: takes the response and reads its body, so that this is tried again too.
            stopped: once set, no further attempt is made.
            parameters: those of the client's method.

        Raises:
            FileNotFoundError: no such object.
            RemoteFailure: the store refused, or failed too often; names key and request id.
        """

        def attempt() -> Any:
            sent = {} if body is None else {"Body": body()}
            return then(self._call(operation, **parameters, **sent))

        return self.attempts(operation, key, attempt, stopped=stopped)[0]

    def _call(self, operation: str, **parameters: Any) -> Any:
        return getattr(client(), operation)(Bucket=self.name, **parameters)

    def _head(self, key: str) -> Object:
        return object_of(key, self._call("head_object", Key=key))

    def _get(self, key: str, start: int, stop: int, etag: str) -> Got:
        match = {"IfMatch": f'"{etag}"'} if etag else {}
        answer = self._call("get_object", Key=key, Range=f"bytes={start}-{stop - 1}", **match)
        return body_of(answer, stop - start)

    def _put(self, key: str, data: bytes, condition: Condition | None) -> bool:
        extra: dict[str, Any] = {}
        if condition is not None:
            replaces = condition.replaces
            match = {"IfMatch": f'"{replaces}"'} if replaces else {"IfNoneMatch": "*"}
            extra = match | {"Metadata": {WRITER: condition.writer}}
        response = self._call("put_object", Key=key, Body=io.BytesIO(data), **extra)
        return _arrived(response, _md5(data), _crc32(data))

    def _writer(self, key: str) -> str | None:
        found: str | None = self._call("head_object", Key=key)["Metadata"].get(WRITER)
        return found

    def _delete(self, key: str) -> None:
        self._call("delete_object", Key=key)

    def _page(self, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        return page_of(self._call("list_objects_v2", Prefix=prefix, **(more or {})))

    def _now(self) -> datetime:
        return date_of(self._call("list_objects_v2", MaxKeys=1))

    def _transient(self, error: Exception) -> bool:
        return is_transient(error)

    def _said(self, error: Exception) -> str:
        return said(error)

    def _translated(
        self, error: Exception, url: str, operation: str, attempts: int
    ) -> Exception | None:
        return translated(error, url, operation, attempts)

    def endpoint(self) -> str:
        return endpoint()

    def upload(self, key: str, path: Path, sha256: str) -> None:
        """Write a local file as an object, in parts if it is large, and check what arrived.

        Args:
            sha256: digest of the file.

        Raises:
            RemoteFailure: nothing new is visible then, and no part is left behind.
        """
        size = path.stat().st_size
        part = part_size(size)
        handle = os.open(path, os.O_RDONLY)
        try:
            if size < 2 * part:
                md5, crc = digests(Slice(handle, 0, size))
                response = self.request(
                    "put_object", key, Key=key, body=lambda: Slice(handle, 0, size)
                )
                proved = _arrived(response, md5, crc)
            else:
                proved = self._upload_parts(key, handle, size, part)
        finally:
            os.close(handle)
        if not proved and not self._reads_back(key, size, sha256):
            self.delete(key)
            raise self._other_bytes(key)

    def _upload_parts(self, key: str, handle: int, size: int, part: int) -> bool:
        """Upload an open file in parts. Returns whether all of it is proved to have arrived."""
        id = self.request("create_multipart_upload", key, Key=key, then=itemgetter("UploadId"))
        stopped = threading.Event()

        def send(number: int) -> tuple[dict[str, Any], str, bool]:
            start = (number - 1) * part
            stop = min(size, start + part)
            md5, crc = digests(Slice(handle, start, stop))
            told, response = self.request(
                "upload_part",
                key,
                Key=key,
                UploadId=id,
                PartNumber=number,
                body=lambda: Slice(handle, start, stop),
                then=lambda response: ({"ETag": response["ETag"]}, response),
                stopped=stopped,
            )
            sums = {k: v for k, v in response.items() if k.startswith("Checksum") and k[8:9] == "C"}
            return {"PartNumber": number} | told | sums, md5, _arrived(response, md5, crc)

        try:
            with ThreadPoolExecutor(PARTS_AT_A_TIME) as pool:
                try:
                    sent = list(pool.map(send, range(1, -(-size // part) + 1)))
                except BaseException:
                    stopped.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            etag = f"{_md5(b''.join(bytes.fromhex(md5) for _, md5, _ in sent))}-{len(sent)}"
            self._complete(key, id, [told for told, _, _ in sent], size, etag)
        except BaseException:
            self._abort_quietly(key, id)
            raise
        return all(proved for _, _, proved in sent)

    def _complete(self, key: str, id: str, parts: list[Any], size: int, etag: str) -> None:
        try:
            self.request(
                "complete_multipart_upload",
                key,
                Key=key,
                UploadId=id,
                MultipartUpload={"Parts": parts},
            )
        except RemoteFailure as failure:
            # Its answer may have been lost: then the upload is gone and the object is there.
            found = self.head(key) if failure.code == "NoSuchUpload" else None
            if found is None or failure.attempts == 1 or (found.size, found.etag) != (size, etag):
                raise

    def _abort_quietly(self, key: str, id: str) -> None:
        try:
            self.abort(Upload(key, id, datetime.min))
        except (
            StorageError
        ) as error:  # the first error is the one to hear of; --clean finds the rest
            _log.warning("%s: an unfinished upload stays behind: %s", self.url(key), error.what)

    def abort(self, upload: Upload) -> None:
        """Give up an unfinished upload; its parts are deleted. One that is gone is no error."""
        try:
            self.request("abort_multipart_upload", upload.key, Key=upload.key, UploadId=upload.id)
        except (FileNotFoundError, RemoteFailure) as error:
            if isinstance(error, RemoteFailure) and error.code not in ("NoSuchUpload", "404"):
                raise

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the unfinished multipart uploads of keys that begin with `prefix`."""
        more: dict[str, Any] = {}
        while True:
            found, more = self.request(
                "list_multipart_uploads", prefix, Prefix=prefix, then=page_of_uploads, **more
            )
            # Whatever the store makes of Prefix.
            yield from (upload for upload in found if upload.key.startswith(prefix))
            if not more:
                return


def part_size(size: int) -> int:
    """Return the part size for an object of `size` bytes: at most 9,000 of the 10,000 parts."""
    return max(SMALLEST_PART, -(-size // MOST_PARTS))


def _arrived(response: Any, md5: str, crc32: str) -> bool:
    """Whether the store's answer to a write proves that these bytes arrived."""
    return etag_of(response) == md5 or response.get("ChecksumCRC32") == crc32


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _crc32(data: bytes) -> str:
    return digests(io.BytesIO(data))[1]
