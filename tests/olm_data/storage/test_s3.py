"""Amazon's protocol by the client of s3fs, and what stands between clients and the network."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.server
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.s3fs_faults import FAULTS, client_of, say, serving
from support.service_checks import check_service

from olm_data.errors import StorageError
from olm_data.storage import async_http
from olm_data.storage import service as timeouts
from olm_data.storage.async_http import (
    MOST_ANSWER,
    MOST_ERROR,
    bounded,
    event_loop,
    guarded,
    one_attempt,
    run,
)
from olm_data.storage.bucket import PIECE, Backoff, Bucket, service
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.s3 import _stay
from olm_data.storage.service import OversizedAnswer, Refusal
from olm_data.storage.store import Store


def test_each_request_does_what_it_says(s3: dict[str, str], tmp_path: Path) -> None:
    check_service(service("s3"), s3["bucket"], tmp_path)


def test_a_refusal_that_only_such_a_store_gives_is_explained(s3: dict[str, str]) -> None:
    assert service("s3").advice(Refusal(412), "GetObject") is None


# Which redirects of an S3 address botocore may act on.
AWS, OTHER = "https://b.s3.us-east-1.amazonaws.com/a", "https://store.example/b/a"


@pytest.mark.parametrize(
    ("url", "status", "region", "stays"),
    [
        (AWS, 301, "eu-west-1", False),  # botocore makes the address of the region itself
        (AWS, 307, "", True),  # it would ask for the region, and be redirected again
        (AWS, 301, "evil.example/", True),
        ("https://amazonaws.com.evil.example/b/a", 301, "eu-west-1", True),
        (OTHER, 301, "eu-west-1", True),
        (OTHER, 302, "", True),
        (OTHER, 400, "eu-west-1", False),  # the same address, signed for its own region
    ],
)
def test_only_aws_may_name_another_region(url: str, status: int, region: str, stays: bool) -> None:
    answer = {"ResponseMetadata": {"HTTPHeaders": {"x-amz-bucket-region": region}}}
    redirect = {"bucket": "b"}
    request = {"url": url, "context": {"s3_redirect": redirect}}
    _stay(request, (SimpleNamespace(status_code=status), answer))
    assert redirect.get("redirected", False) is stays


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__)
def test_a_fault_of_s3fs_stays_closed(check: Callable[[], None]) -> None:
    check()


def test_an_upload_that_is_not_taken_is_given_up_within_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "CONNECT_TIMEOUT", 0.3)
    over = threading.Event()

    def full(handler) -> None:  # its kernel takes what it has room for
        over.wait(60)
        handler.close_connection = True

    with serving(full) as (url, _), client_of(url) as ours:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            ours.put("b", "k", bytes(32 << 20), None)
        assert time.monotonic() - start < timeouts.READ_TIMEOUT
        over.set()


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A profile with a login by SSO, which this process uses; its portal is at the address."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def use(portal: str) -> None:
        (tmp_path / "config").write_text(
            "[profile lab]\nsso_start_url = https://lab\nsso_region = us-east-1\n"
            "sso_account_id = 123456789012\nsso_role_name = reader\nregion = us-east-1\n"
        )
        cache = tmp_path / "cache"
        cache.mkdir()
        token = {"accessToken": "login-token", "expiresAt": "2099-01-01T00:00:00Z"}
        name = hashlib.sha1(b"https://lab").hexdigest()
        (cache / f"{name}.json").write_text(json.dumps(token))
        monkeypatch.setattr("botocore.credentials.SSOProvider._SSO_TOKEN_CACHE_DIR", str(cache))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_PROFILE", "lab")
        monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", portal)

    return use


ROLE = {"accessKeyId": "AKIAOFTHELOGIN", "secretAccessKey": "secret", "sessionToken": "session"}


def test_a_profile_with_a_login_by_sso_is_used(
    login: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    signed: list[str] = []

    def portal(handler) -> None:
        assert handler.headers["x-amz-sso_bearer_token"] == "login-token"
        body = json.dumps({"roleCredentials": ROLE | {"expiration": 4_000_000_000_000}}).encode()
        say(handler, 200, len(body))
        handler.wfile.write(body)

    def store(handler) -> None:
        handler.body()
        signed.append(handler.headers["Authorization"])
        say(handler, 200, ETag=f'"{hashlib.md5(b"x").hexdigest()}"')

    with serving(portal) as (there, _), serving(store) as (here, _):
        login(there)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", here)
        Store("s3://b").put("k", b"x")
    assert "Credential=AKIAOFTHELOGIN/" in signed[0]


def test_the_token_of_a_login_goes_to_no_other_host(
    login: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(handler) -> None:
        say(handler, 200)

    with serving(elsewhere) as (other, reached):

        def portal(handler) -> None:
            say(handler, 307, Location=f"{other}{handler.path}")

        with serving(portal) as (there, asked):
            login(there)
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", other)
            with pytest.raises(StorageError, match="redirects to another address"):
                Store("s3://b").put("k", b"x")
        assert asked
        assert not reached


aiohttp = pytest.importorskip("aiohttp")


seen: list[str] = []


"""The paths that were asked for."""


def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
    seen.append(handler.path)
    kind = handler.path.strip("/")
    if kind == "redirect":
        handler.send_response(302)
        handler.send_header("Location", "/elsewhere")
        handler.end_headers()
        return
    if kind == "drop" and len(seen) > 1:  # on a connection that was kept
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True
        return
    body = b"x" * int(kind if kind.isdigit() else 5)
    handler.send_response(500 if "error" in handler.headers.get("X-Ask", "") else 200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def server() -> Iterator[str]:
    seen.clear()
    with serving(answer) as (url, _):
        yield url


def get(url: str, *middlewares: Any, **headers: str) -> bytes:
    async def one() -> bytes:
        async with (
            aiohttp.ClientSession(middlewares=middlewares) as session,
            session.get(url, headers=headers) as answer,
        ):
            data: bytes = await answer.read()
            return data

    return run(event_loop(), one())


def test_a_redirect_is_refused_before_the_other_place_is_asked(server: str) -> None:
    with pytest.raises(Refusal) as caught:
        get(f"{server}/redirect", guarded)
    assert caught.value.status == 302
    assert seen == ["/redirect"]


def test_an_answer_is_read_up_to_what_was_asked_for(server: str) -> None:
    assert get(f"{server}/10", bounded, Range="bytes=0-9") == b"x" * 10
    with pytest.raises(OversizedAnswer, match="more than 9 bytes"):
        get(f"{server}/10", bounded, Range="bytes=0-8")


def test_an_answer_and_an_error_have_limits_of_their_own(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_http, "MOST_ANSWER", 100)
    monkeypatch.setattr(async_http, "MOST_ERROR", 10)
    assert len(get(f"{server}/100", bounded)) == 100
    with pytest.raises(OversizedAnswer):
        get(f"{server}/101", bounded)
    assert len(get(f"{server}/10", bounded, **{"X-Ask": "error"})) == 10
    with pytest.raises(OversizedAnswer):
        get(f"{server}/11", bounded, **{"X-Ask": "error"})


def test_a_request_on_a_connection_that_breaks_is_sent_once(server: str) -> None:
    async def two() -> None:
        async with aiohttp.ClientSession() as plain:
            session = one_attempt(plain)
            async with session.get(f"{server}/5") as answer:
                await answer.read()
            async with session.get(f"{server}/drop") as answer:
                await answer.read()

    with pytest.raises(aiohttp.ClientError):
        run(event_loop(), two())
    assert seen == ["/5", "/drop"]


def test_whoever_is_interrupted_cancels_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_http.service, "CONNECT_TIMEOUT", 0.05)
    monkeypatch.setattr(async_http.service, "READ_TIMEOUT", 0.05)
    ended: list[str] = []

    async def for_ever() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    start = time.monotonic()
    with pytest.raises(TimeoutError):
        run(event_loop(), for_ever())
    assert time.monotonic() - start < 30
    assert ended == ["cancelled"]


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
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("olm_data.storage.bucket.BACKOFF", Backoff(attempts=2, first=0.001))
    made = Server()
    with serving(made.answer) as (url, _), client_of(url):  # whose description of S3 takes 10 MB
        yield made


@contextlib.contextmanager
def within_bounds(endless: Server, most: int) -> Iterator[None]:
    """Memory stays below `most` and some, and the server got rid of little more."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 3 * most + (8 << 20)
    finally:
        tracemalloc.stop()
    # what the kernel's buffers take is sent, too
    assert endless.sent < most + (16 << 20)


@pytest.mark.parametrize(
    ("status", "chunked"), [(403, True), (404, False), (500, False), (500, True), (301, False)]
)
def test_the_body_of_an_error_is_read_up_to_a_limit(
    endless: Server, status: int, chunked: bool
) -> None:
    endless.status, endless.chunked = status, chunked
    bucket = Bucket("s3", "b")
    for ask in (lambda: bucket.get("k"), lambda: bucket.put("k", b"x"), lambda: bucket.delete("k")):
        endless.sent = endless.requests = 0
        with (
            within_bounds(endless, MOST_ERROR),
            pytest.raises(RemoteFailure, match="1,048,576 bytes"),
        ):
            ask()
        assert endless.requests == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_ranged_read_takes_no_more_than_was_asked_for(endless: Server, chunked: bool) -> None:
    endless.status, endless.chunked = 206, chunked
    endless.headers = {"Content-Range": "bytes 0-99/100", "ETag": '"e"'}
    with within_bounds(endless, 100), pytest.raises(RemoteFailure, match="more than 100 bytes"):
        Bucket("s3", "b").get("k", 0, 100)
    endless.status, endless.headers, endless.sent = 200, {}, 0
    with (
        within_bounds(endless, PIECE),
        pytest.raises(RemoteFailure, match="more than 8,388,608 bytes"),
    ):
        Bucket("s3", "b").get("k")


def test_a_listing_is_read_up_to_a_limit(endless: Server) -> None:
    endless.head = XML
    with (
        within_bounds(endless, MOST_ANSWER),
        pytest.raises(RemoteFailure, match="more than 8,388,608 bytes"),
    ):
        list(Bucket("s3", "b").list(""))


def test_an_object_that_is_never_sent_ends_the_asking(endless: Server) -> None:
    endless.status, endless.headers, endless.size = 206, {"Content-Range": "bytes 0-9/10"}, 0
    with pytest.raises(RemoteFailure):
        Bucket("s3", "b").get("k")
    assert endless.requests == 2
