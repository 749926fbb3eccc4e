"""Files that a web server gives by ranges, to read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from olm_data.errors import UsageError
from olm_data.extras import needs
from olm_data.storage import service
from olm_data.storage.async_http import bounded, event_loop, one_attempt, run
from olm_data.storage.objects import Object, Options
from olm_data.storage.service import GetResult, OversizedAnswer, Refusal, Service

_EPOCH = datetime.fromtimestamp(0, UTC)


class Web(Service):
    """Files that a web server gives by ranges; see `Service`. Nothing secret is sent there."""

    address = "the address"
    login = "the address"

    def __init__(self, scheme: str, options: Options) -> None:
        with needs(f"an {scheme}:// address"):
            import aiohttp
            from fsspec.implementations.http import HTTPFileSystem

        timeout = aiohttp.ClientTimeout(
            sock_connect=service.CONNECT_TIMEOUT, sock_read=service.READ_TIMEOUT
        )
        super().__init__(scheme, options)
        self._fs = HTTPFileSystem(
            client_kwargs={"timeout": timeout, "middlewares": (bounded,)},
            loop=event_loop(),
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def endpoint(self) -> str:
        return f"{self._scheme}://the-web"

    def head(self, bucket: str, key: str) -> Object:
        found, _ = self._ask("HEAD", bucket, key, {"Accept-Encoding": "identity"})
        return Object(key, int(found["Content-Length"]), _version(found), _written(found))

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> GetResult:
        asked = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        date = etag.removeprefix(_DATE)
        if etag:
            asked |= {"If-Unmodified-Since": date} if date != etag else {"If-Match": f'"{etag}"'}
        found, data = self._ask("GET", bucket, key, asked)
        total = found.get("Content-Range", "").rpartition("/")[2]
        if not total and start:
            raise OversizedAnswer("the whole file in place of a part")
        if etag and _version(found) != etag:
            raise Refusal(412, "PreconditionFailed")
        return GetResult(data, _version(found), int(total) if total else len(data))

    def page(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        raise UsageError(
            "there is no such file, and no folder of a web server can be listed",
            where=f"{self._scheme}://{bucket}/{prefix}",
            fix="check the address; name each file",
        )

    def close(self) -> None:
        if self._fs._session is not None:
            self._fs.close_session(self._fs.loop, self._fs._session)

    def _ask(self, method: str, bucket: str, key: str, headers: Any) -> tuple[Any, bytes]:
        async def one() -> tuple[Any, bytes]:
            session = one_attempt(await self._fs.set_session())
            url = f"{self._scheme}://{bucket}/{key}"
            async with session.request(method, url, headers=headers, allow_redirects=True) as got:
                if got.status in (404, 410):
                    raise FileNotFoundError(url)
                if got.status >= 400:
                    raise Refusal(got.status)
                return got.headers, await got.read()

        return run(self._fs.loop, one())


_DATE = "date "


def _version(found: Any) -> str:
    """Return what names a version: a strong ETag, else the date of the last change."""
    etag = found.get("ETag", "")
    if etag.startswith('"'):
        return str(etag.strip('"'))
    return f"{_DATE}{found['Last-Modified']}" if "Last-Modified" in found else ""


def _written(found: Any) -> datetime:
    date = found.get("Last-Modified")
    return parsedate_to_datetime(date) if date else _EPOCH
