"""An S3 server whose answers have no end fills neither memory nor time."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import pytest
from support.s3fs_faults import client_of, serving

from olm_data.storage import bucket
from olm_data.storage.async_http import MOST_ANSWER, MOST_ERROR
from olm_data.storage.bucket import PIECE, Backoff, Bucket
from olm_data.storage.objects import RemoteFailure

ENDLESS = 1 << 40
CHUNKED = ("Transfer-Encoding", "chunked")
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

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer for as long as the client takes it."""
        self.requests += 1
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.send_response_only(self.status)
        length = ("Content-Length", str(self.size))
        for header in (*self.headers.items(), CHUNKED if self.chunked else length):
            handler.send_header(*header)
        handler.end_headers()
        left, block = self.size, self.head or b"x" * 65_536
        handler.close_connection = True  # if the client goes
        while left > 0 and handler.command != "HEAD":
            block = block[:left]
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(block), block) if self.chunked else block)
            self.sent += len(block)
            left, block = left - len(block), b"x" * 65_536
        handler.close_connection = False


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(bucket, "BACKOFF", Backoff(attempts=2, first=0.001))
    made = Server()
    with serving(made.answer) as (url, _), client_of(url):  # whose description of S3 takes 10 MB
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
