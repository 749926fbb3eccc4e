"""An S3 server whose answers have no end fills neither memory nor time."""

from __future__ import annotations

import contextlib
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import pytest
from support.quiet_server import QuietServer

from olm_data.storage import bucket
from olm_data.storage.async_http import MOST_ANSWER, MOST_ERROR
from olm_data.storage.bucket import PIECE, Backoff, Bucket, service
from olm_data.storage.objects import RemoteFailure

ENDLESS = 1 << 40
XML = b"<?xml version='1.0'?><ListBucketResult><Name>"


@dataclass
class Server:
    """What it answers (status, first bytes, bytes in all), and how many bytes it got rid of."""

    status: int = 200
    head: bytes = b""
    size: int = ENDLESS
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False
    sent: int = 0
    requests: int = 0


@contextlib.contextmanager
def serve() -> Iterator[tuple[Server, str]]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def any(self) -> None:
            server.requests += 1
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response_only(server.status)
            for name, value in server.headers.items():
                self.send_header(name, value)
            if server.chunked:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(server.size))
            self.end_headers()
            left, block = server.size, server.head or b"x" * 65_536
            while left > 0 and self.command != "HEAD":
                block = block[:left]
                try:
                    if server.chunked:
                        self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block))
                    else:
                        self.wfile.write(block)
                except OSError:
                    self.close_connection = True
                    return
                server.sent += len(block)
                left, block = left - len(block), b"x" * 65_536

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = any

    http = QuietServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serve() as (made, url):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-this-test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setattr(bucket, "BACKOFF", Backoff(attempts=2, first=0.001))
        service("s3")  # whose own description of S3 takes 10 MB
        yield made


@contextlib.contextmanager
def bounded(server: Server, most: int) -> Iterator[None]:
    """Memory stays below `most` and some, and the server got rid of little more."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 3 * most + (8 << 20)
    finally:
        tracemalloc.stop()
    # what the kernel's buffers take is sent, too
    assert server.sent < most + (16 << 20)


@pytest.mark.parametrize(
    ("status", "chunked"), [(403, True), (404, False), (500, False), (500, True), (301, False)]
)
def test_the_body_of_an_error_is_read_up_to_a_limit(
    server: Server, status: int, chunked: bool
) -> None:
    server.status, server.chunked = status, chunked
    bucket = Bucket("s3", "b")
    for ask in (lambda: bucket.get("k"), lambda: bucket.put("k", b"x"), lambda: bucket.delete("k")):
        server.sent = server.requests = 0
        with bounded(server, MOST_ERROR), pytest.raises(RemoteFailure, match="1,048,576 bytes"):
            ask()
        assert server.requests == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_ranged_read_takes_no_more_than_was_asked_for(server: Server, chunked: bool) -> None:
    server.status, server.chunked = 206, chunked
    server.headers = {"Content-Range": "bytes 0-99/100", "ETag": '"e"'}
    with bounded(server, 100), pytest.raises(RemoteFailure, match="more than 100 bytes"):
        Bucket("s3", "b").get("k", 0, 100)
    server.status, server.headers, server.sent = 200, {}, 0
    with bounded(server, PIECE), pytest.raises(RemoteFailure, match="more than 8,388,608 bytes"):
        Bucket("s3", "b").get("k")


def test_a_listing_is_read_up_to_a_limit(server: Server) -> None:
    server.head = XML
    with (
        bounded(server, MOST_ANSWER),
        pytest.raises(RemoteFailure, match="more than 8,388,608 bytes"),
    ):
        list(Bucket("s3", "b").list(""))


def test_just_the_limit_is_taken_and_one_byte_more_is_not(server: Server) -> None:
    server.status, server.headers = 206, {"Content-Range": "bytes 0-9/10"}
    server.size = 10
    assert Bucket("s3", "b").get("k", 0, 10) == b"x" * 10
    server.size = 11
    with pytest.raises(RemoteFailure, match="more than 10 bytes"):
        Bucket("s3", "b").get("k", 0, 10)
    server.status, server.size = 403, MOST_ERROR
    with pytest.raises(RemoteFailure, match="403"):
        Bucket("s3", "b").get("k")
    server.size += 1
    with pytest.raises(RemoteFailure, match="more than"):
        Bucket("s3", "b").get("k")


def test_an_object_that_is_never_sent_ends_the_asking(server: Server) -> None:
    server.status, server.headers, server.size = 206, {"Content-Range": "bytes 0-9/10"}, 0
    with pytest.raises(RemoteFailure):
        Bucket("s3", "b").get("k")
    assert server.requests == 2
