"""Google Cloud Storage by gcsfs: `gs://bucket/key`.

Address and credentials are found where gcsfs finds them: GOOGLE_APPLICATION_CREDENTIALS, the login
of gcloud, the machine's own account; STORAGE_EMULATOR_HOST names another server. A version of an
object is its generation; the store itself compares the MD5 digest of what it was sent.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from olm_data.bounded_json import decode_object
from olm_data.errors import UsageError
from olm_data.extras import needs
from olm_data.redaction import hold
from olm_data.storage import service
from olm_data.storage.bucket import WRITER, Condition, Got
from olm_data.storage.guard import guarded, one_attempt
from olm_data.storage.in_clear import warn_in_clear
from olm_data.storage.objects import Object
from olm_data.storage.service import Refusal, Service, base64_md5, md5_of, run

PART = 32 << 20  # bytes of a large upload's requests
_ADDRESS = "STORAGE_EMULATOR_HOST"


class Google(Service):
    """One attempt at each request; see `Service`."""

    settings = ("GOOGLE_", "GCSFS_", "GCE_", "CLOUDSDK_", "FSSPEC_G", _ADDRESS)
    address = f"the address ({_ADDRESS}, if it is set)"
    login = "GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`"

    def __init__(self, scheme: str) -> None:
        if "@" in os.environ.get(_ADDRESS, ""):
            raise UsageError(
                f"{_ADDRESS} must not hold credentials",
                fix="put them into a file that GOOGLE_APPLICATION_CREDENTIALS names",
            )
        self._fs = _file_system()
        warn_in_clear(self._fs._location)

    def endpoint(self) -> str:
        return str(self._fs._location)

    def head(self, bucket: str, key: str) -> Object:
        return _object(decode_object(self._call("GET", "b/{}/o/{}", bucket, key)[1]))

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> Got:
        url = f"{self._fs._location}/download/storage/v1/b/{{}}/o/{{}}"
        extra = {"ifGenerationMatch": etag} if etag else {}
        head = {"Range": f"bytes={start}-{stop - 1}"}
        found, data = self._call("GET", url, bucket, key, alt="media", headers=head, **extra)
        total = found.get("Content-Range", "").rpartition("/")[2]
        return Got(data, found["X-Goog-Generation"], int(total) if total else len(data))

    def put(self, bucket: str, key: str, data: bytes, condition: Condition | None) -> bool:
        head = {"Content-Type": 'multipart/related; boundary="==olm=="'}
        told: dict[str, Any] = {"name": key, "md5Hash": base64_md5(data)}
        extra = {}
        if condition is not None:
            extra["ifGenerationMatch"] = condition.replaces or "0"
            told["metadata"] = {WRITER: condition.writer}
        body = (
            b"--==olm==\r\nContent-Type: application/json\r\n\r\n"
            + json.dumps(told).encode()
            + b"\r\n--==olm==\r\nContent-Type: application/octet-stream\r\n\r\n"
            + data
            + b"\r\n--==olm==--"
        )
        url = f"{self._fs._location}/upload/storage/v1/b/{{}}/o"
        _, answer = self._call(
            "POST", url, bucket, uploadType="multipart", headers=head, data=body, **extra
        )
        return bool(decode_object(answer)["md5Hash"] == told["md5Hash"])

    def put_file(self, bucket: str, key: str, path: Path) -> bool:
        size = path.stat().st_size
        place = f"{bucket}/{key}"
        octets = "application/octet-stream"
        run(
            self._fs.loop,
            self._fs._put_file(str(path), place, content_type=octets, chunksize=PART),
            size,
        )
        found = decode_object(self._call("GET", "b/{}/o/{}", bucket, key)[1])
        same: bool = found.get("md5Hash") == base64.b64encode(md5_of(path)).decode()
        return int(found["size"]) == size and same

    def writer(self, bucket: str, key: str) -> str | None:
        found = decode_object(self._call("GET", "b/{}/o/{}", bucket, key)[1])
        writer: str | None = found.get("metadata", {}).get(WRITER)
        return writer

    def page(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        answer = self._call("GET", "b/{}/o", bucket, prefix=prefix, pageToken=more)[1]
        found = decode_object(answer)
        return [_object(item) for item in found.get("items", ())], found.get("nextPageToken")

    def delete(self, bucket: str, key: str) -> None:
        self._call("DELETE", "b/{}/o/{}", bucket, key)

    def now(self, bucket: str) -> datetime:
        return parsedate_to_datetime(self._call("GET", "b/{}/o", bucket, maxResults=1)[0]["Date"])

    def close(self) -> None:
        self._fs.close_session(self._fs.loop, self._fs._session)

    def _call(self, method: str, url: str, *args: str, **parameters: Any) -> Any:
        """Return headers and body of an answer."""
        sends = len(parameters.get("data", b""))
        return run(self._fs.loop, self._fs._call(method, url, *args, **parameters), sends)


def _object(found: Any) -> Object:
    modified = datetime.fromisoformat(found["updated"])
    return Object(found["name"], int(found["size"]), str(found["generation"]), modified)


def _file_system() -> Any:
    with needs("a gs:// address"):
        from gcsfs.core import GCSFileSystem  # isort: skip  # first: its absence names the extra
        import aiohttp

    class Once(GCSFileSystem):
        """gcsfs without its loop of attempts, and with answers told apart by their status."""

        async def _request(
            self,
            method: str,
            path: str,
            *args: str,
            headers: Any = None,
            json: Any = None,
            data: Any = None,
            **kwargs: Any,
        ) -> Any:
            one_attempt(await self._set_session())
            sent = self._get_headers(headers)
            token = sent.get("authorization") or sent.get("Authorization") or ""
            hold(str(token).rpartition(" ")[2])
            async with self.session.request(
                method=method,
                url=self._format_path(path, args),
                params=self._get_params(kwargs),
                json=json,
                headers=sent,
                data=data,
            ) as answer:
                body = await answer.read()
                if answer.status >= 400 and answer.status != 499:  # 499: an upload given up
                    raise _refused(answer.status, answer.headers, body)
                return answer.status, answer.headers, answer.request_info, body

    emulated = os.environ.get(_ADDRESS) and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    return Once(
        token="anon" if emulated else None,
        session_kwargs={
            "middlewares": (guarded,),
            "timeout": aiohttp.ClientTimeout(
                sock_connect=service.CONNECT_TIMEOUT, sock_read=service.READ_TIMEOUT
            ),
        },
        loop=service.event_loop(),
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def _refused(status: int, headers: Any, body: bytes) -> Exception:
    if status == 404:
        return FileNotFoundError("no such object")
    if status == 412:
        return FileExistsError("a condition does not hold")
    code, message = "", ""
    try:
        said = decode_object(body)["error"]
        message = str(said["message"])
        code = str(said["errors"][0]["reason"])
    except (ValueError, LookupError, TypeError):
        pass
    return Refusal(status, code, message, headers.get("X-GUploader-UploadID", ""))
