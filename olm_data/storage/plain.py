"""File systems of fsspec as they are: `memory://`; `http(s)://` and `hf://` to read.

What a process keeps in memory ends with it, and its workers do not see it: for trying out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from olm_data.errors import UsageError
from olm_data.extras import needs
from olm_data.storage import service
from olm_data.storage.async_http import bounded, event_loop, one_attempt, run
from olm_data.storage.hub import hub_filesystem
from olm_data.storage.objects import Object
from olm_data.storage.options import Options
from olm_data.storage.service import Condition, Got, OversizedAnswer, Refusal, Service, base64_md5

_EPOCH = datetime.fromtimestamp(0, UTC)


class Memory(Service):
    """The memory of this process; see `Service`."""

    def __init__(self, scheme: str, options: Options) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        self._fs = MemoryFileSystem(skip_instance_cache=True)
        self._writers: dict[str, str] = {}

    def endpoint(self) -> str:
        return "memory://this-process"

    def head(self, bucket: str, key: str) -> Object:
        return self._object(bucket, self._fs.info(f"/{bucket}/{key}"))

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> Got:
        found = self.head(bucket, key)
        if etag and found.etag != etag:
            raise Refusal(412, "PreconditionFailed")
        data = self._fs.cat_file(f"/{bucket}/{key}", start=start, end=stop)
        return Got(data, found.etag, found.size)

    def put(self, bucket: str, key: str, data: bytes, condition: Condition | None) -> bool:
        path, create = f"/{bucket}/{key}", condition is not None and not condition.replaces
        replaces = "" if condition is None else condition.replaces
        try:
            if replaces and self.head(bucket, key).etag != replaces:
                raise FileExistsError(path)
            self._fs.pipe_file(path, data, mode="create" if create else "overwrite")
        except FileExistsError:
            raise Refusal(412) from None
        self._writers[path] = condition.writer if condition else ""
        return True

    def put_file(self, bucket: str, key: str, path: Path) -> bool:
        return self.put(bucket, key, path.read_bytes(), None)

    def writer(self, bucket: str, key: str) -> str | None:
        return self._writers.get(f"/{bucket}/{key}")

    def page(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        objects = []
        for _, info in sorted(self._fs.find(f"/{bucket}", detail=True).items()):
            with suppress(FileNotFoundError):  # deleted by another thread since it was listed
                objects.append(self._object(bucket, info))
        return [item for item in objects if item.key.startswith(prefix)], None

    def delete(self, bucket: str, key: str, etag: str) -> None:
        if etag and self.head(bucket, key).etag != etag:
            raise Refusal(412)
        self._fs.rm_file(f"/{bucket}/{key}")

    def _object(self, bucket: str, info: Any) -> Object:
        if info["type"] != "file":
            raise FileNotFoundError(info["name"])
        name = info["name"]
        etag = base64_md5(self._fs.cat_file(name))
        modified = self._fs.modified(name).replace(tzinfo=UTC)
        return Object(name.removeprefix(f"/{bucket}/"), int(info["size"]), etag, modified)


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

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> Got:
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
        return Got(data, _version(found), int(total) if total else len(data))

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


class Hub(Service):
    """Repositories of the hub, as `hf://datasets/ORG/NAME/PATH`; see `Service`.

    Its file system keeps the listings it was given, and is made for one thread. So one at a time
    asks it what there is, which also means that a folder is listed once; bytes are read beside.
    """

    settings = ("HF_",)
    address = "HF_ENDPOINT, if it is set"
    login = "HF_TOKEN or `hf auth login`"

    def __init__(self, scheme: str, options: Options) -> None:
        self._fs, self._lock = hub_filesystem(), threading.RLock()

    def endpoint(self) -> str:
        return str(self._fs.endpoint or "https://huggingface.co")

    def head(self, bucket: str, key: str) -> Object:
        with _refusals(), self._lock:
            return self._object(bucket, self._fs.info(f"{bucket}/{key}"))

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> Got:
        found = self.head(bucket, key)
        if etag and found.etag != etag:
            raise Refusal(412, "PreconditionFailed")
        with _refusals():
            with self._lock:
                opened = self._fs.open(f"{bucket}/{key}", "rb", cache_type="none")
            with opened as file:
                file.seek(start)
                return Got(file.read(min(stop, found.size) - start), found.etag, found.size)

    def page(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        folder = f"{bucket}/{prefix}".rpartition("/")[0]
        with _refusals(), self._lock:
            found = self._fs.find(folder, detail=True)
        objects = [self._object(bucket, info) for _, info in sorted(found.items())]
        return [item for item in objects if item.key.startswith(prefix)], None

    def _object(self, bucket: str, info: Any) -> Object:
        if info["type"] != "file":
            raise FileNotFoundError(info["name"])
        key = info["name"].removeprefix(f"{bucket}/")
        commit = info.get("last_commit")
        return Object(
            key, info["size"], str(info.get("blob_id")), commit.date if commit else _EPOCH
        )


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            raise Refusal(status) from None
        raise
