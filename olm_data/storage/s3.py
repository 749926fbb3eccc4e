"""Amazon S3, and whatever speaks its protocol, by the client of s3fs: `s3://bucket/key`.

Address and credentials are found where every tool of AWS finds them: AWS_ENDPOINT_URL,
AWS_ACCESS_KEY_ID, AWS_PROFILE, roles of the machine. The store tells the MD5 digest or the CRC-32
of what it was sent; a part that is missing of an answer is a KeyError here.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zlib
from collections.abc import Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from olm_data.storage.async_http import Sending, event_loop, run
from olm_data.storage.aws_client import make_client
from olm_data.storage.file_part import Slice
from olm_data.storage.objects import Object, RemoteFailure, Upload
from olm_data.storage.options import Options
from olm_data.storage.service import WRITER, Condition, GetResult, Part, Refusal, Service

_AT_ONCE = 64 << 10
"""Bytes of a body that goes out with its head; before a larger one the client asks to go on."""
CHECKSUM_SETTING = "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"


class S3(Service):
    """One attempt at each request; see `Service`."""

    settings = ("AWS_", "FSSPEC_S3")
    address = "the address (AWS_ENDPOINT_URL)"
    login = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
    own_address = (
        "set AWS_ENDPOINT_URL to the store's own address, and AWS_DEFAULT_REGION to the region "
        "of the bucket"
    )
    parts_at_a_time = 4

    def __init__(self, scheme: str, options: Options) -> None:
        super().__init__(scheme, options)
        self._client = make_client(options)

    def endpoint(self) -> str:
        return str(self._client.meta.endpoint_url)

    @property
    def sends_checksums(self) -> bool:
        """Whether each write goes with a checksum that some stores refuse."""
        return bool(self._client.meta.config.request_checksum_calculation != "when_required")

    def head(self, bucket: str, key: str) -> Object:
        return _object(key, self._call("head_object", bucket, Key=key), "ContentLength")

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> GetResult:
        match = {"IfMatch": f'"{etag}"'} if etag else {}
        span = f"bytes={start}-{stop - 1}"
        answer = self._call("get_object", bucket, Key=key, Range=span, **match)
        data, total = answer["Body"], answer.get("ContentRange", "").rpartition("/")[2]
        return GetResult(data, _etag(answer), int(total) if total.isdigit() else len(data))

    def put(self, bucket: str, key: str, data: bytes, condition: Condition | None) -> bool:
        extra: dict[str, Any] = {}
        if condition is not None:
            replaces = condition.replaces
            match = {"IfMatch": f'"{replaces}"'} if replaces else {"IfNoneMatch": "*"}
            extra = match | {"Metadata": {WRITER: condition.writer}}
        return self._sent("put_object", bucket, io.BytesIO(data), Key=key, **extra)[1]

    def put_file(self, bucket: str, key: str, path: Path) -> bool:
        with path.open("rb", buffering=0) as file:
            return self._sent("put_object", bucket, file, Key=key)[1]

    def writer(self, bucket: str, key: str) -> str | None:
        found: str | None = self._call("head_object", bucket, Key=key)["Metadata"].get(WRITER)
        return found

    def page(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        page = self._call("list_objects_v2", bucket, Prefix=prefix, **(more or {}))
        found = [_object(item["Key"], item, "Size") for item in page.get("Contents", ())]
        return found, _next_page(page, "ContinuationToken")

    def delete(self, bucket: str, key: str, etag: str) -> None:
        extra = {"IfMatch": f'"{etag}"'} if etag else {}
        self._call("delete_object", bucket, Key=key, **extra)

    def now(self, bucket: str) -> datetime:
        answer = self._call("list_objects_v2", bucket, MaxKeys=1)
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])

    def begin(self, bucket: str, key: str, path: Path) -> str:
        return str(self._call("create_multipart_upload", bucket, Key=key)["UploadId"])

    def send(self, upload: Upload, bucket: str, number: int, body: Slice) -> Part:
        named = {"Key": upload.key, "UploadId": upload.id, "PartNumber": number}
        answer, proved = self._sent("upload_part", bucket, body, **named)
        sums = {k: v for k, v in answer.items() if k.startswith("ChecksumC")}
        return Part({"PartNumber": number, "ETag": answer["ETag"]} | sums, proved)

    def complete(self, upload: Upload, bucket: str, parts: Sequence[Any]) -> None:
        named = {"Key": upload.key, "UploadId": upload.id, "MultipartUpload": {"Parts": parts}}
        self._call("complete_multipart_upload", bucket, **named)

    def abort(self, upload: Upload, bucket: str) -> None:
        self._call("abort_multipart_upload", bucket, Key=upload.key, UploadId=upload.id)

    def uploads(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Upload], Any]:
        page = self._call("list_multipart_uploads", bucket, Prefix=prefix, **(more or {}))
        found = [Upload(i["Key"], i["UploadId"], i["Initiated"]) for i in page.get("Uploads", ())]
        return found, _next_page(page, "KeyMarker", "UploadIdMarker")

    def advice(self, refusal: Refusal, operation: str) -> tuple[str, str] | None:
        writes = operation in ("put_object", "upload_part", "create_multipart_upload")
        if not (writes and refusal.status in (400, 501) and self.sends_checksums):
            return None
        return (
            f"{refusal.message}; some stores do not know the checksums that clients send by "
            "default",
            f"export {CHECKSUM_SETTING}, then run the same command again",
        )

    def close(self) -> None:
        run(event_loop(), self._client.close())

    def _sent(self, operation: str, bucket: str, body: Any, **named: Any) -> tuple[Any, bool]:
        """Return the answer to a write, and whether it proves that these bytes arrived."""
        md5, crc, size = hashlib.md5(usedforsecurity=False), 0, 0
        while chunk := body.read(1 << 20):
            md5.update(chunk)
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        body.seek(0)
        sent = body.read() if size <= _AT_ONCE else Sending(body, size)
        answer = self._call(operation, bucket, Body=sent, **named)
        sum = base64.b64encode(crc.to_bytes(4, "big")).decode()
        return answer, _etag(answer) == md5.hexdigest() or answer.get("ChecksumCRC32") == sum

    def _call(self, operation: str, bucket: str, **parameters: Any) -> Any:
        from botocore import exceptions as known

        async def once() -> Any:
            answer = await getattr(self._client, operation)(Bucket=bucket, **parameters)
            if "Body" in answer:
                async with answer["Body"] as stream:
                    answer["Body"] = await stream.read()
            return answer

        try:
            body = parameters.get("Body")
            return run(event_loop(), once(), body if isinstance(body, Sending) else None)
        except known.ClientError as error:
            refusal = _refusal(error)
            missing = refusal.code in ("NoSuchKey", "NotFound") or str(refusal) == "404"
            if missing and operation in ("get_object", "head_object", "delete_object"):
                raise FileNotFoundError("no such object") from None
            raise refusal from None
        except known.HTTPClientError as error:
            if type(error) is known.HTTPClientError:  # of nothing that the client knows
                raise error.kwargs["error"] from None
            raise
        except known.NoCredentialsError:
            raise RemoteFailure(
                "no credentials for S3 were found",
                where=f"s3://{bucket}",
                fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            ) from None
        except known.BotoCoreError as error:
            passing = (known.ConnectionError, known.IncompleteReadError)
            if isinstance(error, (*passing, known.FlexibleChecksumError)):
                raise
            raise RemoteFailure(
                f"the S3 client fails: {type(error).__name__}",
                where=f"s3://{bucket} ({operation})",
                fix=f"check {self.login}, AWS_PROFILE (`aws sso login`), AWS_DEFAULT_REGION and "
                f"{self.address}",
            ) from None


def _object(key: str, found: Any, size: str) -> Object:
    return Object(key, found[size], _etag(found), found["LastModified"])


def _etag(found: Any) -> str:
    return str(found.get("ETag", "")).strip('"')


def _next_page(page: Any, *names: str) -> dict[str, Any]:
    return {name: page[f"Next{name}"] for name in names} if page.get("IsTruncated") else {}


def _refusal(error: Any) -> Refusal:
    response, meta = error.response, error.response.get("ResponseMetadata", {})
    status, told = int(meta.get("HTTPStatusCode", 0)), response.get("Error", {})
    request = meta.get("RequestId") or meta.get("HTTPHeaders", {}).get("x-amz-request-id", "")
    code = str(told.get("Code", "")).removeprefix(str(status))  # a HEAD has no body
    return Refusal(status, code, str(told.get("Message", "")), str(request))
