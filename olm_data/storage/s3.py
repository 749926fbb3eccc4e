"""S3 through AWS's own client: each request bounded in time, tried again, verified, and explained.

    Bucket.get | head | list                  -> bytes, S3Object, ...
    Bucket.put | upload (multipart) | delete  -> what arrived is what was sent

The client makes one attempt a request; the one retry loop is here, around request and body, so that
a stalled store costs attempts x timeout and not the product of three loops. A request whose answer
was lost may have been done: creating and completing look before they call it a conflict.
Never: an open-for-write handle, a credential in a message, another prefix than the caller's.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from olm_data.errors import StorageError, UsageError
from olm_data.regular_files import refuse_large
from olm_data.storage.retry import Backoff, retried
from olm_data.storage.s3_answer import (
    S3Object,
    Upload,
    body_of,
    date_of,
    etag_of,
    object_of,
    page_of,
    page_of_uploads,
)
from olm_data.storage.s3_body import Slice, digests
from olm_data.storage.s3_client import client
from olm_data.storage.s3_errors import S3Failure, is_transient, said, translated

BACKOFF = Backoff()
FIRST_CONTACT = Backoff(attempts=6, within=60)  # see `Bucket`
PIECE = 8 << 20  # bytes of one ranged read
SMALLEST_PART, MOST_PARTS = 16 << 20, 9000
PARTS_AT_A_TIME = 4
WRITER = "olm-writer"  # metadata of a created object: tells ours from a rival's of the same bytes
_log = logging.getLogger(__name__)


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and key (no leading or trailing slash) of `s3://bucket/key`."""
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise UsageError("the URL names no bucket", where=url, fix="write s3://BUCKET/PREFIX")
    return bucket, key.strip("/")


class Bucket:
    """The objects of one bucket.

    Args:
        name: bucket.
        hasty: before work starts: say within seconds that the store does not answer.
    """

    def __init__(self, name: str, *, hasty: bool = False) -> None:
        self.name, self.hasty = name, hasty

    def url(self, key: str) -> str:
        """Return `s3://bucket/key`."""
        return f"s3://{self.name}/{key}"

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
        """Make one request, again while its errors are transient.

        Args:
            operation: name of the client's method.
            key: object or prefix the request is about, for messages.
            body: makes the body, afresh for each attempt.
            then: takes the response and reads its body, so that this is tried again too.
            stopped: once set, no further attempt is made.
            parameters: those of the client's method.

        Raises:
            FileNotFoundError: no such object.
            S3Failure: the store refused, or failed too often; names key and request id.
        """
        url, tries = self.url(key), [1]

        def attempt(number: int) -> Any:
            tries[0] = number
            sent = {} if body is None else {"Body": body()}
            call = getattr(client(), operation)
            return then(call(Bucket=self.name, **parameters, **sent))

        def again(error: Exception) -> bool:
            return is_transient(error) and not (stopped is not None and stopped.is_set())

        def failed(error: Exception, number: int, seconds: float) -> None:
            if number > 1 or seconds > 5:  # a single hiccup is no news
                _log.warning("%s: %s; trying again (%d)", url, said(error), number + 1)

        try:
            backoff = FIRST_CONTACT if self.hasty else BACKOFF
            return retried(attempt, backoff, again, failed)
        except Exception as error:
            problem = translated(error, url, operation, tries[0])
            if problem is None:  # not the store's doing
                raise
        # Outside the handler: the client's own error repeats what the store sent, and whoever
        # prints a chain of errors would print that.
        raise problem

    def head(self, key: str) -> S3Object | None:
        """Return what is known of an object, or None where there is none."""
        try:
            known: S3Object = self.request(
                "head_object", key, Key=key, then=lambda found: object_of(key, found)
            )
        except FileNotFoundError:
            return None
        return known

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
            S3Failure: `code` is "PreconditionFailed" where the object is another version.
        """
        parts: list[bytes] = []
        while stop is None or start < stop:
            end = start + PIECE if stop is None else min(stop, start + PIECE)
            wanted: dict[str, Any] = {"Key": key, "Range": f"bytes={start}-{end - 1}"}
            if etag is not None:
                wanted["IfMatch"] = f'"{etag}"'
            try:
                read = partial(body_of, most=end - start)
                data, etag, size = self.request("get_object", key, then=read, **wanted)
            except S3Failure as failure:
                if failure.code in ("InvalidRange", "416"):  # at or past the end
                    break
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
        extra: dict[str, Any] = {}
        conditional = create or replaces is not None
        if conditional:
            writer = uuid.uuid4().hex
            match = {"IfNoneMatch": "*"} if create else {"IfMatch": f'"{replaces}"'}
            extra = match | {"Metadata": {WRITER: writer}}
        try:
            response = self.request(
                "put_object", key, Key=key, body=lambda: io.BytesIO(data), **extra
            )
        except S3Failure as failure:
            if not conditional or failure.code not in ("PreconditionFailed", "412"):
                raise
            # The answer to an earlier attempt may have been lost: then the object there is ours.
            if failure.attempts == 1 or self._writer(key) != writer:
                raise FileExistsError(self.url(key)) from failure
            response = {}
        if not _arrived(response, _md5(data), _crc32(data)) and self.get(key) != data:
            raise self._other_bytes(key)

    def upload(self, key: str, path: Path, sha256: str) -> None:
        """Write a local file as an object, in parts if it is large, and check what arrived.

        Args:
            sha256: digest of the file.

        Raises:
            S3Failure: nothing new is visible then, and no part is left behind.
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
        except S3Failure as failure:
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
        except (FileNotFoundError, S3Failure) as error:
            if isinstance(error, S3Failure) and error.code not in ("NoSuchUpload", "404"):
                raise

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""
        self.request("delete_object", key, Key=key)

    def list(self, prefix: str) -> Iterator[S3Object]:
        """Yield the objects whose keys begin with `prefix`, by key."""
        more: dict[str, Any] = {}
        while True:
            found, more = self.request(
                "list_objects_v2", prefix, Prefix=prefix, then=page_of, **more
            )
            yield from found
            if not more:
                return

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

    def now(self) -> datetime:
        """Return the store's own clock, by the date of an answer."""
        return cast(datetime, self.request("list_objects_v2", "", MaxKeys=1, then=date_of))

    def _writer(self, key: str) -> str | None:
        metadata = self.request("head_object", key, Key=key, then=itemgetter("Metadata"))
        return cast("str | None", metadata.get(WRITER))

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
