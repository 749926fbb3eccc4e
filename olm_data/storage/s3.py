"""Amazon S3, and whatever speaks its protocol, by the client of s3fs: `s3://bucket/key`.

Address and credentials are found where every tool of AWS finds them: AWS_ENDPOINT_URL,
AWS_ACCESS_KEY_ID, AWS_PROFILE, roles of the machine. The store tells the MD5 digest or the CRC-32
of what it was sent; a part that is missing of an answer is a KeyError here.

Also: the client of s3fs as it is used here: one attempt a request, answers bounded, credentials
home.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from olm_data.errors import UsageError, words
from olm_data.extras import install, needs
from olm_data.redaction import echoes, hold
from olm_data.storage import service
from olm_data.storage.async_http import BoundedBody, Sending, bounded, event_loop, one_attempt, run
from olm_data.storage.objects import Object, Options, RemoteFailure, Upload
from olm_data.storage.plaintext_warning import warn_plaintext
from olm_data.storage.service import (
    WRITER,
    Condition,
    CredentialEcho,
    FileSlice,
    GetResult,
    Refusal,
    SentPart,
    Service,
)

_REGION = re.compile(r"[a-z0-9-]{1,32}")
_ACCOUNTS = ("Owner", "Initiator")
"""Fields that some stores fill with the access key's name, rightly; nothing here reads them."""


def make_client(options: Options) -> Any:
    """Return a client for the address and credentials that options or the environment name now.

    Raises:
        MissingExtra: the package for S3 is missing.
        UsageError: the address holds credentials.
    """
    with needs("an s3:// address"):
        from s3fs import S3FileSystem  # isort: skip  # first: its absence names the extra
        from aiobotocore.config import AioConfig
        from aiobotocore.httpsession import AIOHTTPSession
        from aiobotocore.session import AioSession

    class Session(AIOHTTPSession):
        """aiobotocore's, over sessions of aiohttp that are guarded; logins use it too."""

        async def _get_session(self, proxy_url: str | None) -> Any:
            return _Guarded(await super()._get_session(proxy_url))

        async def send(self, request: Any) -> Any:
            answer = await super().send(request)
            if not isinstance(answer.raw.content, BoundedBody):  # another way to send than is known
                raise UsageError("this version of aiobotocore cannot be used", fix=install("s3"))
            return answer

    files = S3FileSystem(
        **{name: value for name, value in options.items() if name != "config_kwargs"},
        config_kwargs={
            **options.get("config_kwargs", {}),
            "connect_timeout": service.CONNECT_TIMEOUT,
            "read_timeout": service.READ_TIMEOUT,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "max_pool_connections": 32,
        },
        asynchronous=True,
        skip_instance_cache=True,
    )
    files.session = AioSession(**files.kwargs)
    files.session.set_default_client_config(AioConfig(http_session_cls=Session))
    made = run(event_loop(), files.set_session())
    if "@" in urlsplit(made.meta.endpoint_url).netloc:
        raise UsageError(
            "the address of the store (AWS_ENDPOINT_URL) must not hold credentials",
            fix="put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    _guard(made)
    return made


class _Guarded:
    """A session of aiohttp: a request goes to one host, once, and its answer has a limit."""

    def __init__(self, session: Any) -> None:
        self._session = one_attempt(session)

    async def request(self, *args: Any, **named: Any) -> Any:
        return await self._session.request(
            *args, allow_redirects=False, middlewares=(bounded,), **named
        )


def _guard(client: Any) -> None:
    async def learn(request_signer: Any, **_: Any) -> None:
        if request_signer._credentials is not None:
            frozen = await request_signer._credentials.get_frozen_credentials()
            hold(frozen.access_key, frozen.secret_key, frozen.token)
            warn_plaintext(client.meta.endpoint_url)

    events = client.meta.events
    # First: botocore's own handler, which follows, looks at what this one leaves in the context.
    events.register_first("needs-retry.s3", _stay)
    events.register_last("after-call.s3", _checked)
    events.register_first("before-sign.s3", learn)


def _stay(request_dict: dict[str, Any], response: Any, **_: Any) -> None:
    """Keep botocore from following a redirect, but to another region's address of AWS.

    It never follows `Location`; it asks for the bucket's region, and asks again for ever where each
    answer is a redirect. A region that the answer itself names needs no question.
    """
    if response is None:
        return
    answer, parsed = response
    headers = parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or parsed.get("Error", {}).get("Region", "")
    host = urlsplit(request_dict["url"]).hostname or ""
    of_aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    redirect = answer is not None and 300 <= answer.status_code < 400
    if not _REGION.fullmatch(region) or (redirect and not of_aws):
        request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True


def _checked(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
    if http_response.status_code < 300:
        if echoes(_without_accounts(parsed)):
            raise CredentialEcho
        return
    kept = {name: _bounded(parsed.get(name, {})) for name in ("Error", "ResponseMetadata")}
    parsed.clear()
    parsed.update(kept)


def _without_accounts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_accounts(part) for k, part in value.items() if k not in _ACCOUNTS}
    return [_without_accounts(part) for part in value] if isinstance(value, list) else value


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return words(value)
    if isinstance(value, Mapping):
        return {words(str(key)): _bounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_bounded(part) for part in value]
    return value


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

    def send(self, upload: Upload, bucket: str, number: int, body: FileSlice) -> SentPart:
        named = {"Key": upload.key, "UploadId": upload.id, "PartNumber": number}
        answer, proved = self._sent("upload_part", bucket, body, **named)
        sums = {k: v for k, v in answer.items() if k.startswith("ChecksumC")}
        return SentPart({"PartNumber": number, "ETag": answer["ETag"]} | sums, proved)

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
