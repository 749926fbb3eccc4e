"""What stands between the clients over aiohttp and the network."""

from __future__ import annotations

import asyncio
import http.server
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.s3fs_faults import serving

from olm_data.storage import async_http
from olm_data.storage.async_http import bounded, event_loop, guarded, one_attempt, run
from olm_data.storage.service import OversizedAnswer, Refusal

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
