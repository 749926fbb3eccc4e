"""A server of JSON on loopback: it answers, hangs, answers 500, closes half-way, or is absent."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from support.quiet_server import QuietHandler
from support.quiet_server import serving as quietly


class Service:
    """What a service knows; `answer` is called for one request at a time.

    Attributes:
        mode: `ok`, `hang`, `500`, `reset` or `absent`; all but `absent` may be set while it serves.
        url: of it, once it serves.
        asked: paths of the requests so far.
    """

    def __init__(self, mode: str = "ok") -> None:
        self.mode, self.url = mode, ""
        self.asked: list[str] = []
        self.lock, self.free = threading.Lock(), threading.Event()

    def answer(self, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """Return the status and the JSON for a request."""
        return 200, {}


@contextlib.contextmanager
def serving(service: Service) -> Iterator[str]:
    """Serve on a free port and yield the URL."""

    class Handler(QuietHandler):
        def answer(self) -> None:
            body = self.body()
            service.asked.append(self.path)
            if service.mode == "hang":
                service.free.wait()
                self.close_connection = True
            elif service.mode == "reset":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
                self.close_connection = True
            elif service.mode == "500":
                self.give(500, {"error": "out of order"})
            else:
                whole = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
                parts = urlsplit(self.path)
                with service.lock:
                    sent = self.headers.get("Content-Type", "").startswith("application/json")
                    given = json.loads(whole) if whole and sent else None
                    self.give(*service.answer(parts.path, dict(parse_qsl(parts.query)), given))

        def give(self, status: int, value: Any) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = answer

    with quietly(Handler) as server:
        service.url = server.url
        if service.mode != "absent":
            try:
                yield service.url
            finally:
                service.free.set()
            return
    yield service.url  # where nobody listens any more
