"""A real HTTP proxy between client and server of a store that does to requests what networks do.

    client -> (endpoint = this proxy) -> rule matches? fault : pass -> the server -> back

The client signs the proxy's own Host header and the proxy forwards it unchanged, so the server
checks the signature of exactly what the client sent. Servers: see `s3` and `clouds`.

    with store_proxy(server) as proxy:
        proxy.inject(answer(503, "SlowDown"), method="PUT", key=r"manifest", times=2)
        ...
        proxy.seen  # every request: number, method, path
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from support.google_sessions import Sessions
from support.quiet_server import QuietHandler, QuietServer, serving

from olm_data.storage.store import Store


@dataclass(frozen=True)
class Seen:
    """One request: its number from 0, method, and path with query."""

    number: int
    method: str
    path: str
    conditional: bool


class Dropped(Exception):
    """The connection was cut; nothing more is to be sent on it."""


Fault = Callable[["Exchange"], None]
"""Does one whole exchange, in a wrong way."""


@dataclass
class Exchange:
    """One request as it came and the means to deal with it."""

    handler: Any
    proxy: Proxy
    body: bytes

    def forward(self, length: int | None = None) -> tuple[Any, bytes]:
        """Send the request on, only `length` bytes of its body if given; return the answer."""
        path, sessions = self.handler.path, self.proxy.sessions
        if sessions is not None and "upload_id=" in path:
            span = self.handler.headers.get("Content-Range", "")
            told = sessions.answer(self.handler.command, path, span, self.body[:length])
            if length is not None:
                raise Dropped
            return told
        upstream = http.client.HTTPConnection(self.proxy.upstream, timeout=60)
        upstream.putrequest(
            self.handler.command, self.handler.path, skip_host=True, skip_accept_encoding=True
        )
        for name, value in self.handler.headers.items():
            if name.lower() not in ("expect", "connection"):
                upstream.putheader(name, value)
        upstream.endheaders()
        upstream.send(self.body if length is None else self.body[:length])
        if length is not None:
            upstream.close()
            raise Dropped
        response = upstream.getresponse()
        data = response.read()
        upstream.close()
        if sessions is not None and "uploadType=resumable" in path:
            sessions.begun(path, self.body, response.headers["Location"])
        return response, data

    def reply(
        self, response: http.client.HTTPResponse, data: bytes, cut: int | None = None
    ) -> None:
        """Send an answer back; with `cut`, only so many bytes of the body it announces."""
        self.handler.send_response_only(response.status, response.reason)
        headers = [h for h in response.getheaders() if h[0].lower() not in ("connection",)]
        if not any(name.lower() == "content-length" for name, _ in headers):
            headers = [h for h in headers if h[0].lower() != "transfer-encoding"]
            headers.append(("Content-Length", str(len(data))))
        for name, value in headers:
            self.handler.send_header(name, value)
        self.handler.end_headers()
        if self.handler.command != "HEAD":
            self.handler.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.handler.wfile.flush()
            raise Dropped

    def reset(self) -> None:
        """Cut the client's connection with a TCP reset."""
        linger = struct.pack("ii", 1, 0)
        self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        raise Dropped


def passing(exchange: Exchange) -> None:
    """No fault."""
    exchange.reply(*exchange.forward())


def reset(exchange: Exchange) -> None:
    """The connection is reset before the server gets the request."""
    exchange.reset()


def lost_answer(exchange: Exchange) -> None:
    """The server does what is asked, but its answer never arrives."""
    exchange.forward()
    exchange.reset()


def stall(exchange: Exchange) -> None:
    """Nothing happens any more, and the connection stays open."""
    exchange.proxy.closing.wait()
    raise Dropped


def delay(seconds: float) -> Fault:
    """The answer comes late."""

    def fault(exchange: Exchange) -> None:
        exchange.proxy.closing.wait(seconds)
        passing(exchange)

    return fault


def answer(status: int, code: str, message: str = "injected") -> Fault:
    """The store itself answers with an error."""

    def fault(exchange: Exchange) -> None:
        body = (
            f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message>'
            "<RequestId>injected-id</RequestId></Error>"
        ).encode()
        if exchange.proxy.server["kind"] == "gs":
            errors = [{"reason": code, "message": message}]
            told = {"error": {"code": status, "message": message, "errors": errors}}
            body = json.dumps(told).encode()
        exchange.handler.send_response_only(status, code)
        exchange.handler.send_header("Content-Length", str(len(body)))
        for name in ("x-amz-request-id", "x-ms-request-id", "X-GUploader-UploadID"):
            exchange.handler.send_header(name, "injected-id")
        exchange.handler.send_header("x-ms-error-code", code)
        exchange.handler.send_header("Content-Type", "application/xml")
        exchange.handler.end_headers()
        if exchange.handler.command != "HEAD":
            exchange.handler.wfile.write(body)

    return fault


def cut_response(exchange: Exchange) -> None:
    """The body of the answer ends in the middle."""
    response, data = exchange.forward()
    exchange.reply(response, data, cut=len(data) // 2)


def cut_request(exchange: Exchange) -> None:
    """The body of the request reaches the server only in part."""
    try:
        exchange.forward(len(exchange.body) // 2)
    except Dropped:
        exchange.reset()


def ignore_condition(exchange: Exchange) -> None:
    """The store overwrites although it was told to create: what was there is deleted first."""
    exchange.proxy.delete(exchange)
    passing(exchange)


def throttled(bytes_per_second: int) -> Fault:
    """The answer comes at this rate."""

    def fault(exchange: Exchange) -> None:
        response, data = exchange.forward()
        exchange.handler.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            exchange.handler.send_header(name, value)
        exchange.handler.end_headers()
        step = max(1, bytes_per_second // 20)
        for start in range(0, len(data), step):
            exchange.handler.wfile.write(data[start : start + step])
            time.sleep(step / bytes_per_second)

    return fault


@dataclass
class Rule:
    """A fault and the requests it befalls."""

    fault: Fault
    method: str
    key: re.Pattern[str]
    numbers: range | None
    conditional: bool
    left: int | None

    def takes(self, seen: Seen) -> bool:
        """Whether it befalls this request; counts down if so."""
        if (
            self.left == 0
            or (self.method and seen.method != self.method)
            or not self.key.search(seen.path)
            or (self.numbers is not None and seen.number not in self.numbers)
            or (self.conditional and not seen.conditional)
        ):
            return False
        if self.left is not None:
            self.left -= 1
        return True


@dataclass
class Proxy:
    """A running proxy.

    Attributes:
        url: the endpoint to give to clients.
        upstream: host:port of the server behind it.
        seen: the requests so far, in order of arrival.
        sessions: what fake-gcs-server lacks (see `google_sessions`).
    """

    server: dict[str, str]
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    sessions: Sessions | None = None

    def __post_init__(self) -> None:
        if self.server["kind"] == "gs":
            self.sessions = Sessions(self.upstream)

    @property
    def upstream(self) -> str:
        return urlsplit(self.server["endpoint_url"]).netloc

    def inject(
        self,
        *faults: Fault,
        at: int | None = None,
        method: str = "",
        key: str = "",
        conditional: bool = False,
        times: int | None = 1,
    ) -> None:
        """Add faults.

        Args:
            faults: with `at`, they befall requests at, at + 1, ...; else each is a rule, in order.
            method, key: only this method, only paths with queries that match this expression.
            conditional: only requests with If-None-Match, or Google's word for it.
            times: how many requests a rule befalls at most; None for all.
        """
        for offset, fault in enumerate(faults):
            numbers = None if at is None else range(at + offset, at + offset + 1)
            self.rules.append(Rule(fault, method, re.compile(key), numbers, conditional, times))

    def clear(self) -> None:
        """Forget all rules and requests."""
        with self._guard:
            self.rules.clear()
            self.seen.clear()

    def choose(self, method: str, path: str, conditional: bool) -> Fault:
        """Record a request and return what to do with it."""
        with self._guard:
            seen = Seen(len(self.seen), method, path, conditional)
            self.seen.append(seen)
            return next((rule.fault for rule in self.rules if rule.takes(seen)), passing)

    def delete(self, exchange: Exchange) -> None:
        """Delete the object that a request is about, behind the client's back."""
        kind = self.server["kind"]
        if kind != "s3":
            from support.clouds import delete

            delete(self.server, exchange.handler.path, exchange.body)
            return
        from support.s3 import client

        path = urlsplit(exchange.handler.path).path
        bucket, _, key = path.lstrip("/").partition("/")
        client(self.server).delete_object(Bucket=bucket, Key=key)


@contextlib.contextmanager
def store_proxy(server: dict[str, str]) -> Iterator[Proxy]:
    """Yield a proxy in front of the server that lives inside the block."""
    proxy = Proxy(server)

    class Handler(QuietHandler):
        timeout = 60
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            try:
                body = self.body()
                conditional = "If-None-Match" in self.headers or "ifGenerationMatch=" in self.path
                fault = proxy.choose(self.command, self.path, conditional)
                fault(Exchange(self, proxy, body))
            except (Dropped, OSError, http.client.HTTPException):
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    class Server(QuietServer):
        def shutdown_request(self, request: Any) -> None:
            """Close at once: shutting down first would turn a reset into an ordinary end."""
            self.close_request(request)

    with serving(Handler, Server) as listening:
        proxy.url = listening.url
        try:
            yield proxy
        finally:
            proxy.closing.set()


def operate(operation: str, store: Store) -> None:
    """Write, read, size, list or delete the object `a` of a store that holds `x` in it."""
    if operation == "write":
        store.put("a", b"y")
    elif operation == "read":
        assert store.read("a") == b"x"
    elif operation == "size":
        assert store.size("a") == 1
    elif operation == "list":
        assert [entry.name for entry in store.entries()] == ["a"]
    else:
        store.delete("a")
