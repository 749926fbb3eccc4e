"""Google Cloud Storage by gcsfs: `gs://bucket/key`.

Address and credentials are found where gcsfs finds them: GOOGLE_APPLICATION_CREDENTIALS, the login
of gcloud, the machine's own account; STORAGE_EMULATOR_HOST names another server. A version of an
object is its generation; the store itself compares the MD5 digest of what it was sent.

Large files go by a resumable session, part after part, over the generation that was there when it
began: begin -> session -> PUT of a part -> ... -> the object, by the last one. After a part whose
answer did not come, the session is asked how far it is, and the rest of the part is sent.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from olm_data.bounded_json import decode_object
from olm_data.errors import UsageError
from olm_data.extras import needs
from olm_data.redaction import hold
from olm_data.storage import service
from olm_data.storage.async_http import event_loop, guarded, one_attempt, run
from olm_data.storage.objects import Object, Options, RemoteFailure, Upload
from olm_data.storage.plaintext_warning import warn_plaintext
from olm_data.storage.service import (
    WRITER,
    Condition,
    FileSlice,
    GetResult,
    Refusal,
    SentPart,
    Service,
    base64_md5,
)

_OCTETS = "application/octet-stream"
_ADDRESS = "STORAGE_EMULATOR_HOST"
_ANONYMOUS = "CLOUDSDK_AUTH_DISABLE_CREDENTIALS"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_METADATA = {"GCE_METADATA_TIMEOUT": "2", "GCE_METADATA_DETECT_RETRIES": "1"}
"""Whether this machine has an account of its own is asked once, for 2 s; by default for 12."""


@dataclass
class _Session:
    """An upload in parts.

    Attributes:
        md5: of the whole file.
        in_doubt: whether the last part was sent and no answer came.
        proved: whether the store has told this digest of what it made of them.
    """

    md5: str
    in_doubt: bool = False
    proved: bool = False


class Google(Service):
    """One attempt at each request; see `Service`."""

    settings = ("GOOGLE_", "GCSFS_", "GCE_METADATA_HOST", "GCE_METADATA_IP", "CLOUDSDK_", _ADDRESS)
    address = f"the address ({_ADDRESS}, if it is set)"
    parts_at_a_time = 1
    login = "GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`"

    def __init__(self, scheme: str, options: Options) -> None:
        if "@" in os.environ.get(_ADDRESS, ""):
            raise UsageError(
                f"{_ADDRESS} must not hold credentials",
                fix="put them into a file that GOOGLE_APPLICATION_CREDENTIALS names",
            )
        self._fs = _file_system(options)
        self._sessions: dict[str, _Session] = {}
        warn_plaintext(self._fs._location)

    def endpoint(self) -> str:
        return str(self._fs._location)

    def head(self, bucket: str, key: str) -> Object:
        return _object(decode_object(self._call("GET", "b/{}/o/{}", bucket, key)[1]))

    def get(self, bucket: str, key: str, start: int, stop: int, etag: str) -> GetResult:
        url = f"{self._fs._location}/download/storage/v1/b/{{}}/o/{{}}"
        extra = {"ifGenerationMatch": etag} if etag else {}
        head = {"Range": f"bytes={start}-{stop - 1}"}
        found, data = self._call("GET", url, bucket, key, alt="media", headers=head, **extra)
        total = found.get("Content-Range", "").rpartition("/")[2]
        return GetResult(data, found["X-Goog-Generation"], int(total) if total else len(data))

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

    def begin(self, bucket: str, key: str, path: Path) -> str:
        with open(path, "rb") as file:
            md5 = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).digest()
        told = {"name": key, "md5Hash": base64.b64encode(md5).decode()}
        try:
            before = self.head(bucket, key).etag
        except FileNotFoundError:
            before = "0"
        url = f"{self._fs._location}/upload/storage/v1/b/{{}}/o"
        extra = {"uploadType": "resumable", "name": key, "ifGenerationMatch": before}
        head = {"Content-Type": "application/json", "X-Upload-Content-Type": _OCTETS}
        found, _ = self._call(
            "POST", url, bucket, headers=head, data=json.dumps(told).encode(), **extra
        )
        place = urlsplit(found["Location"])  # of this store, whatever host an answer names
        id = f"{place.path}?{place.query}".replace("{", "%7B").replace("}", "%7D")
        self._sessions[id] = _Session(told["md5Hash"])
        return id

    def send(self, upload: Upload, bucket: str, number: int, body: FileSlice) -> SentPart:
        session, kept, done = self._sessions[upload.id], body.start, False
        if session.in_doubt:
            kept, done = self._sent(upload, f"*/{body.whole}", b"")
        session.in_doubt = True
        if not done and body.start <= kept < body.stop:
            body.seek(kept - body.start)
            span = f"{kept}-{body.stop - 1}/{body.whole}"
            kept, done = self._sent(upload, span, body.read())
        if done or kept == body.stop < body.whole:
            session.in_doubt = False
            return SentPart(number, proved=session.proved or not done)
        raise ConnectionError(f"the store has kept {kept:,} bytes of the first {body.stop:,}")

    def _sent(self, upload: Upload, span: str, data: bytes) -> tuple[int, bool]:
        """Send bytes of a file; return how many of them all are kept, and whether it is done."""
        head = {"Content-Range": f"bytes {span}", "Content-Type": _OCTETS}
        url = f"{self._fs._location}{upload.id}"
        try:
            sent = self._fs._request("PUT", url, headers=head, data=data)
            status, found, _, answer = run(self._fs.loop, sent, len(data))
        except FileNotFoundError:
            raise Refusal(410, "UploadGone", "the store has forgotten this upload") from None
        if status == 308:
            last = found.get("Range", "").rpartition("-")[2]
            return (int(last) + 1 if last else 0), False
        session = self._sessions[upload.id]
        session.proved = decode_object(answer).get("md5Hash") == session.md5
        return int(span.rpartition("/")[2]), True

    def complete(self, upload: Upload, bucket: str, parts: Sequence[Any]) -> None:
        self._sessions.pop(upload.id, None)  # the last part has made the object

    def abort(self, upload: Upload, bucket: str) -> None:
        self._sessions.pop(upload.id, None)
        with contextlib.suppress(FileNotFoundError):
            self._call("DELETE", f"{self._fs._location}{upload.id}")

    def writer(self, bucket: str, key: str) -> str | None:
        found = decode_object(self._call("GET", "b/{}/o/{}", bucket, key)[1])
        writer: str | None = found.get("metadata", {}).get(WRITER)
        return writer

    def page(self, bucket: str, prefix: str, more: Any) -> tuple[Sequence[Object], Any]:
        answer = self._call("GET", "b/{}/o", bucket, prefix=prefix, pageToken=more)[1]
        found = decode_object(answer)
        return [_object(item) for item in found.get("items", ())], found.get("nextPageToken")

    def delete(self, bucket: str, key: str, etag: str) -> None:
        extra = {"ifGenerationMatch": etag} if etag else {}
        self._call("DELETE", "b/{}/o/{}", bucket, key, **extra)

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


def _credentials() -> Any:
    """Return what Google's own libraries find, or "anon" where none is to be sent."""
    if os.environ.get(_ANONYMOUS, "").lower() in ("1", "true"):
        return "anon"
    if os.environ.get(_ADDRESS) and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return "anon"
    for name, value in _METADATA.items():  # read when the library is imported
        os.environ.setdefault(name, value)
    import google.auth
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport.requests import Request

    try:
        found, _ = google.auth.default(scopes=[_SCOPE], request=Request())
    except GoogleAuthError as error:
        raise RemoteFailure(
            "no credentials for Google Cloud Storage were found",
            where="gs://",
            why=f"{type(error).__name__}: no file, no login, and no account of this machine",
            fix="set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or log in "
            f"with `gcloud auth application-default login`; for a public bucket {_ANONYMOUS}=true",
        ) from None
    return found


def _file_system(options: Options) -> Any:
    with needs("a gs:// address"):
        from gcsfs.core import GCSFileSystem  # isort: skip  # first: its absence names the extra
        import aiohttp

    class OnceGCS(GCSFileSystem):
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
                    raise _refusal(answer.status, answer.headers, body)
                return answer.status, answer.headers, answer.request_info, body

    return OnceGCS(
        **({"token": _credentials()} if "token" not in options else {}),
        **options,
        session_kwargs={
            "middlewares": (guarded,),
            "timeout": aiohttp.ClientTimeout(
                sock_connect=service.CONNECT_TIMEOUT, sock_read=service.READ_TIMEOUT
            ),
        },
        loop=event_loop(),
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def _refusal(status: int, headers: Any, body: bytes) -> Exception:
    if status in (404, 410):  # 410: of an upload
        return FileNotFoundError("no such object")
    code, message = "", ""
    try:
        said = decode_object(body)["error"]
        message = str(said["message"])
        code = str(said["errors"][0]["reason"])
    except (ValueError, LookupError, TypeError):
        pass
    return Refusal(status, code, message, headers.get("X-GUploader-UploadID", ""))
