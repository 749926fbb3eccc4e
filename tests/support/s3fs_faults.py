"""Four faults of s3fs that `olm_data.storage` closes: each provoked by a server of its own.

    python tests/support/s3fs_faults.py     judges the installed versions; exit 1: one is open

After `pip install --upgrade s3fs aiobotocore aiohttp`: the same provocations as the tests run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.quiet_server import QuietHandler
from support.quiet_server import serving as quietly

from olm_data.storage.bucket import service
from olm_data.storage.service import Condition, OversizedAnswer, Refusal, Service

CREATE = Condition(replaces="", writer="me")
Answer = Callable[[Any], None]
"""Answers a request: gets its handler."""


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """Serve on loopback; yield the address, and the methods of the requests that came."""
    seen: list[str] = []

    class Handler(QuietHandler):
        def any(self) -> None:
            seen.append(self.command)
            with contextlib.suppress(OSError):
                answer(self)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = any

    with quietly(Handler) as server:
        yield server.url, seen


@contextlib.contextmanager
def client_of(url: str) -> Iterator[Service]:
    """Yield this process's service for a server, with a session token."""
    given = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "AKIAQX7EXAMPLE5ZKWPL",
        "AWS_SECRET_ACCESS_KEY": "wJq8rXtnFEMI2K7DENGxbPxRfiCYzEXKMPLkey",
        "AWS_SESSION_TOKEN": "IQoJb3Jp2luX2VjEPTx9Lm2Qv7Zk4Wb1Ht8Rc3Nd6Yg5Fs0Uj",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield service("s3")
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def say(handler: Any, status: int, size: int = 0, **headers: str) -> None:
    """Answer with a status, headers, and the length of a body that the caller sends."""
    handler.send_response_only(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(size))
    handler.end_headers()


def refused(ask: Callable[[], object]) -> int:
    """Return the status of a refusal, 0 where there is none."""
    try:
        ask()
    except Refusal as refusal:
        return refusal.status
    return 0


def redirect_is_not_followed() -> None:
    """(1) No other host gets what is signed for this one, nor the session token."""

    def elsewhere(handler: Any) -> None:
        handler.body()
        say(handler, 200, ETag='"e"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT")

    with serving(elsewhere) as (other, reached):
        for status in (301, 302, 303, 307, 308):

            def here(handler: Any, status: int = status) -> None:
                handler.body()
                say(handler, status, Location=f"{other}{handler.path}")

            with serving(here) as (url, seen), client_of(url) as ours:
                for ask in (
                    lambda: ours.get("b", "k", 0, 9, ""),
                    lambda: ours.put("b", "k", b"x", CREATE),
                    lambda: ours.begin("b", "k", Path("f")),
                    lambda: ours.page("b", "", None),
                ):
                    assert refused(ask) == status, f"{status} was followed, or taken for an answer"
                assert not reached, f"another host was asked: {reached}"
                assert len(seen) == 4, seen


def request_is_sent_once() -> None:
    """(2) A create whose connection breaks, or that is refused in passing, is one request."""
    kept = threading.Event()

    def breaking(handler: Any) -> None:
        handler.body()
        if not kept.is_set():  # the first one keeps its connection
            kept.set()
            say(handler, 200, ETag='"e"')
            return
        handler.close_connection = True

    with serving(breaking) as (url, seen), client_of(url) as ours:
        ours.put("b", "k", b"x", None)
        with contextlib.suppress(Exception):
            ours.put("b", "k", b"x", CREATE)
        assert seen == ["PUT"] * 2, f"the create was sent {len(seen) - 1} times"
    for status in (429, 500, 503):

        def busy(handler: Any, status: int = status) -> None:
            handler.body()
            say(handler, status)

        with serving(busy) as (url, seen), client_of(url) as ours:
            assert refused(lambda ours=ours: ours.put("b", "k", b"x", CREATE)) == status
            assert len(seen) == 1, f"{status}: sent {len(seen)} times"


def interrupted_upload_ends() -> None:
    """(3) What an interrupt breaks off does not go on behind the exception."""
    size, got, over = 64 << 20, [0], threading.Event()

    def slowly(handler: Any) -> None:
        got[0] += len(handler.rfile.read(1 << 20))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.3)
        while data := handler.rfile.read1(1 << 20):
            got[0] += len(data)
        over.set()
        handler.close_connection = True

    with serving(slowly) as (url, _), client_of(url) as ours:
        try:
            ours.put("b", "k", bytes(size), None)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the interrupt was lost")
        assert over.wait(60), "the connection stays open behind the interrupt"
        assert got[0] < size, "the upload went on behind the interrupt, to its end"


def error_body_has_a_limit() -> None:
    """(4) The body of an error is read up to a limit."""
    for status in (301, 403, 404, 500):
        sent = [0]

        def endless(handler: Any, status: int = status, sent: list[int] = sent) -> None:
            handler.body()
            say(handler, status, 1 << 40)
            while True:  # until the client is gone
                sent[0] += handler.wfile.write(bytes(1 << 16))

        with serving(endless) as (url, _), client_of(url) as ours:
            try:
                ours.get("b", "k", 0, 9, "")
            except OversizedAnswer:
                pass
            else:
                raise AssertionError(f"{status}: an answer without end was taken")
            assert sent[0] < 32 << 20, f"{status}: {sent[0]:,} bytes were read"


FAULTS = (
    redirect_is_not_followed,
    request_is_sent_once,
    interrupted_upload_ends,
    error_body_has_a_limit,
)


def main() -> int:
    """Print the versions, and a verdict on each fault."""
    from importlib.metadata import version

    print(*(f"{name} {version(name)}" for name in ("s3fs", "aiobotocore", "botocore", "aiohttp")))
    faults = 0
    for check in FAULTS:
        try:
            check()
            verdict = "closed"
        except Exception as error:
            verdict, faults = f"OPEN: {type(error).__name__}: {error}", faults + 1
        print(f"{check.__name__.replace('_', ' ')}: {verdict}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
