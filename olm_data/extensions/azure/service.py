"""Azure Blob Storage by adlfs: `az://container/key`, or `abfs://container/key`.

Account and credentials are found where adlfs finds them: AZURE_STORAGE_CONNECTION_STRING, or
AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or the login of
`az login` and managed identities. The store compares the MD5 digest of each block it is sent.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from olm_data.extras import needs
from olm_data.redaction import hold
from olm_data.storage import service
from olm_data.storage.async_http import event_loop, guarded, one_attempt, run
from olm_data.storage.objects import Object, Options, Upload
from olm_data.storage.plaintext_warning import warn_plaintext
from olm_data.storage.service import (
    WRITER,
    Condition,
    FileSlice,
    GetResult,
    Refusal,
    SentPart,
    Service,
)

BLOCK = 16 << 20  # bytes
_WRITER = WRITER.replace("-", "_")  # a name of metadata is an identifier


class Azure(Service):
    """One attempt at each request; see `Service`."""

    settings = ("AZURE_", "FSSPEC_A")
    address = "AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_ACCOUNT_NAME"
    login = "AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_KEY or `az login`"
    parts_at_a_time = 4

    def __init__(self, scheme: str, options: Options) -> None:
        _hold_settings()
        self._fs = _file_system(options)
        warn_plaintext(self.endpoint())

    def endpoint(self) -> str:
        return str(self._fs.service_client.url)

    def head(self, bucket: str, key: str) -> Object:
        return _object(self._run(self._blob(bucket, key).get_blob_properties()))

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> GetResult:
        async def read() -> GetResult:
            stream = await self._blob(bucket, key).download_blob(
                offset=start, length=stop - start, max_concurrency=1, **_same(etag)
            )
            data = await stream.readall()
            found = stream.properties
            size = int(found.size) if found.content_range is None else _total(found)
            return GetResult(data, found.etag.strip('"'), size)

        return self._run(read())

    def put(self, bucket: str, key: str, data: bytes, condition: Condition | None) -> bool:
        extra: dict[str, Any] = {"overwrite": True}
        if condition is not None:
            extra = _same(condition.replaces) or {"overwrite": False}
            extra = {"overwrite": bool(condition.replaces)} | extra
            extra["metadata"] = {_WRITER: condition.writer}
        blob = self._blob(bucket, key)
        self._run(blob.upload_blob(data, validate_content=True, **extra), len(data))
        return True

    def put_file(self, bucket: str, key: str, path: Path) -> bool:
        with path.open("rb") as file:
            blob, size = self._blob(bucket, key), path.stat().st_size
            self._run(
                blob.upload_blob(file, length=size, overwrite=True, validate_content=True), size
            )
        return self.head(bucket, key).size == size

    def begin(self, bucket: str, key: str, path: Path) -> str:
        return uuid.uuid4().hex  # blocks need no beginning, only names of their own

    def send(self, upload: Upload, bucket: str, number: int, body: FileSlice) -> SentPart:
        name, data = f"{upload.id}-{number:05d}", body.read()
        blob = self._blob(bucket, upload.key)
        self._run(blob.stage_block(name, data, len(data), validate_content=True), len(data))
        return SentPart(name, proved=True)

    def complete(self, upload: Upload, bucket: str, parts: Sequence[Any]) -> None:
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(block_id=name) for name in parts]
        self._run(self._blob(bucket, upload.key).commit_block_list(blocks))

    def writer(self, bucket: str, key: str) -> str | None:
        found = self._run(self._blob(bucket, key).get_blob_properties()).metadata
        writer: str | None = found.get(_WRITER)
        return writer

    def page(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        async def one() -> tuple[Sequence[Object], Any]:
            container = self._fs.service_client.get_container_client(bucket)
            blobs = container.list_blobs(name_starts_with=prefix, results_per_page=1000)
            pages = blobs.by_page(more)
            async for page in pages:
                return [_object(item) async for item in page], pages.continuation_token
            return [], None

        return self._run(one())

    def delete(self, bucket: str, key: str, etag: str) -> None:
        self._run(self._blob(bucket, key).delete_blob(**_same(etag)))

    def now(self, bucket: str) -> datetime:
        dates: list[str] = []
        container = self._fs.service_client.get_container_client(bucket)
        asked = container.get_container_properties(
            raw_response_hook=lambda answer: dates.append(answer.http_response.headers["Date"])
        )
        self._run(asked)
        return parsedate_to_datetime(dates[0])

    def close(self) -> None:
        run(self._fs.loop, self._fs.service_client.close())

    def _blob(self, bucket: str, key: str) -> Any:
        return self._fs.service_client.get_blob_client(bucket, key)

    def _run(self, work: Any, sends: int = 0) -> Any:
        from azure.core import exceptions as known

        try:
            return run(self._fs.loop, work, sends)
        except known.ResourceNotFoundError:
            raise FileNotFoundError("no such object") from None
        except known.HttpResponseError as error:
            if not error.status_code:
                raise
            raise _refusal(error) from None


def _refusal(error: Any) -> Refusal:
    told = getattr(error, "error_code", None)
    code = str(getattr(told, "value", told) or "")
    status = 412 if code == "BlobAlreadyExists" else error.status_code
    message = str(error.message).partition("\n")[0]
    return Refusal(
        status, code, message, getattr(error.response, "headers", {}).get("x-ms-request-id", "")
    )


def _same(etag: str) -> dict[str, Any]:
    from azure.core import MatchConditions

    return {"etag": f'"{etag}"', "match_condition": MatchConditions.IfNotModified} if etag else {}


def _total(found: Any) -> int:
    return int(found.content_range.rpartition("/")[2])


def _object(found: Any) -> Object:
    modified = found.last_modified.astimezone(UTC)
    return Object(found.name, int(found.size), found.etag.strip('"'), modified)


def _hold_settings() -> None:
    """Tell the redaction the secret parts of the settings."""
    connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.partition("=")[::2] for part in connection.split(";"))
    hold(parts.get("AccountKey"), os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"))
    hold(os.environ.get("AZURE_STORAGE_CLIENT_SECRET"))
    for token in (parts.get("SharedAccessSignature"), os.environ.get("AZURE_STORAGE_SAS_TOKEN")):
        if token:
            hold(token, dict(parse_qsl(token.lstrip("?"))).get("sig"))


def _file_system(options: Options) -> Any:
    with needs("an az:// address"):
        from adlfs import AzureBlobFileSystem  # isort: skip  # first: its absence names the extra
        import aiohttp
        from azure.core.pipeline.transport import AioHttpTransport
        from azure.storage.blob.aio import BlobServiceClient

    class Transport(AioHttpTransport):
        """Azure's own, over a session whose answers are guarded."""

        session: Any

        async def open(self) -> None:
            if self.session is None and not self._has_been_opened:
                self.session = one_attempt(
                    aiohttp.ClientSession(
                        trust_env=True,
                        cookie_jar=aiohttp.DummyCookieJar(),
                        auto_decompress=False,
                        middlewares=(guarded,),
                    )
                )
            await super().open()

    class OnceAzure(AzureBlobFileSystem):
        """adlfs with a client that makes one attempt a request."""

        service_client: Any

        def do_connect(self) -> None:
            super().do_connect()
            first = self.service_client
            self.service_client = BlobServiceClient(
                first.url,
                credential=first.credential,
                transport=Transport(
                    connection_timeout=service.CONNECT_TIMEOUT, read_timeout=service.READ_TIMEOUT
                ),
                retry_total=0,
                permit_redirects=False,
                max_single_put_size=BLOCK,
                max_block_size=BLOCK,
                max_single_get_size=BLOCK,
                max_chunk_get_size=BLOCK,
            )

    made = OnceAzure(
        **options, loop=event_loop(), use_listings_cache=False, skip_instance_cache=True
    )
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        # Closing at exit is `Azure.close`, in the process that opened.
        alive = finalizer.peek()
        if alive is not None and alive[0] is made:
            finalizer.atexit = False
    return made
