"""File systems of fsspec as they are: `memory://`; `hf://` to read.

What a process keeps in memory ends with it, and its workers do not see it: for trying out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from olm_data.storage.hub import hub_filesystem
from olm_data.storage.objects import Object, Options
from olm_data.storage.service import Condition, GetResult, Refusal, Service, base64_md5

_EPOCH = datetime.fromtimestamp(0, UTC)


class MemoryStore(Service):
    """The memory of this process; see `Service`."""

    def __init__(self, scheme: str, options: Options) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        self._fs = MemoryFileSystem(skip_instance_cache=True)
        self._writers: dict[str, str] = {}

    def endpoint(self) -> str:
        return "memory://this-process"

    def head(self, bucket: str, key: str) -> Object:
        return self._object(bucket, self._fs.info(f"/{bucket}/{key}"))

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> GetResult:
        found = self.head(bucket, key)
        if etag and found.etag != etag:
            raise Refusal(412, "PreconditionFailed")
        data = self._fs.cat_file(f"/{bucket}/{key}", start=start, end=stop)
        return GetResult(data, found.etag, found.size)

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

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> GetResult:
        found = self.head(bucket, key)
        if etag and found.etag != etag:
            raise Refusal(412, "PreconditionFailed")
        with _refusals():
            with self._lock:
                opened = self._fs.open(f"{bucket}/{key}", "rb", cache_type="none")
            with opened as file:
                file.seek(start)
                return GetResult(file.read(min(stop, found.size) - start), found.etag, found.size)

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
