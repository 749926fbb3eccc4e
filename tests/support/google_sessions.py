"""Google's resumable uploads as its documentation has them, before a fake-gcs-server that has not.

    chunk PUT -> what is kept of it (multiples of 256 KiB, bytes that came twice once) -> the server
    PUT of `bytes */N` -> 308 and how far it is | the answer to the last chunk, again
    last chunk -> does `ifGenerationMatch` still hold? else 412

The server by itself takes the question for the end, appends what comes twice, and forgets the
condition. Used by `store_proxy`; a session's first request passes through `begun`.
"""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, quote, urlsplit

UNIT = 256 << 10


@dataclass
class Told:
    """An answer of ours, with what `store_proxy` takes of `http.client.HTTPResponse`."""

    status: int
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def getheaders(self) -> list[tuple[str, str]]:
        """Return names and values."""
        return list(self.headers.items())


@dataclass
class _Session:
    """One upload: bytes kept, its condition, and the last answer once it is done."""

    bucket: str
    key: str
    condition: str | None
    kept: int = 0
    done: bytes | None = None


Answer = tuple[Told, bytes]


class Sessions:
    """The uploads of one server.

    Args:
        upstream: its host and port.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._open: dict[str, _Session] = {}

    def begun(self, path: str, body: bytes, location: str) -> None:
        """Note an upload that a request to `path` began, and the address it was given."""
        asked = parse_qs(urlsplit(path).query)
        key = asked["name"][0] if "name" in asked else str(json.loads(body)["name"])
        bucket = path.partition("/b/")[2].partition("/")[0]
        id = parse_qs(urlsplit(location).query)["upload_id"][0]
        self._open[id] = _Session(bucket, key, asked.get("ifGenerationMatch", [None])[0])

    def answer(self, method: str, path: str, span: str, body: bytes) -> Answer:
        """Do what a request to a session asks for, with as much of its body as came."""
        id = parse_qs(urlsplit(path).query)["upload_id"][0]
        session = self._open.get(id)
        if method == "DELETE" and session is not None:
            del self._open[id]
            return Told(499, "Client Closed Request"), b""
        if session is None:
            return Told(404, "Not Found"), b""
        if session.done is not None:
            return Told(200, "OK", {"Content-Type": "application/json"}), session.done
        found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)", span)
        assert found, span
        total = int(found[3])
        if found[1] is not None:
            start, data = int(found[1]), body
            if start > session.kept:
                return Told(503, "Service Unavailable"), b""
            data = data[session.kept - start :]
            whole = session.kept + len(data) == total
            data = data if whole else data[: len(data) // UNIT * UNIT]
            if whole and not self._holds(session):
                told = {"error": {"errors": [{"reason": "conditionNotMet"}], "message": "not met"}}
                return Told(412, "Precondition Failed"), json.dumps(told).encode()
            if data:
                last = session.kept + len(data) - 1
                status, said = self._send("PUT", path, data, f"bytes {session.kept}-{last}/{total}")
                assert status == (200 if whole else 308), said
                session.kept += len(data)
                if whole:
                    session.done = said
                    return Told(200, "OK", {"Content-Type": "application/json"}), said
        head = {"Range": f"bytes=0-{session.kept - 1}"} if session.kept else {}
        return Told(308, "Resume Incomplete", head), b""

    def _holds(self, session: _Session) -> bool:
        place = f"/storage/v1/b/{session.bucket}/o/{quote(session.key, safe='')}"
        status, said = self._send("GET", place, b"", "")
        there = json.loads(said)["generation"] if status == 200 else "0"
        return session.condition in (None, there)

    def _send(self, method: str, path: str, body: bytes, span: str) -> tuple[int, bytes]:
        upstream = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            upstream.request(method, path, body, {"Content-Range": span} if span else {})
            answer = upstream.getresponse()
            return answer.status, answer.read()
        finally:
            upstream.close()
