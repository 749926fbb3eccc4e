"""A webhook on loopback: keeps what it is sent, and answers as badly as it is told to."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from support.quiet_server import QuietHandler, serving

TOKEN = "T0AbCdEf12/B0GhIjKl34/qRsTuVwXyZ0123456789abcd"
"""What is secret of its address."""


@dataclass
class Webhook:
    """The address, and the bodies that came.

    Attributes:
        how: `ok`, `hang` (no answer for 60 s), `500`, `404`, `close` (half an answer), `drip`,
            `wait` (taken once `stop` is set).
        fails: so many requests are answered like that, then all are taken; None: all.
        asked: set by the first request.
    """

    url: str = ""
    how: str = "ok"
    fails: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)

    @property
    def events(self) -> list[tuple[str, int]]:
        """Event and step of each message that was taken."""
        return [(body["event"], body["step"]) for body in self.bodies]


@contextlib.contextmanager
def webhook(how: str = "ok", fails: int | None = None) -> Iterator[Webhook]:
    """Serve on a free port, until the block ends."""
    hook = Webhook(how=how, fails=fails)

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.0"

        def do_POST(self) -> None:
            body = self.body()
            how = hook.how
            hook.asked.set()
            if how == "wait":
                hook.stop.wait(60)
                how = "ok"
            if hook.fails is not None:
                how, hook.fails = (how, hook.fails - 1) if hook.fails else ("ok", 0)
            if how == "hang":
                hook.stop.wait(60)
                return
            if how == "close":
                self.wfile.write(b"HTTP/1.0 20")
                return
            if how == "drip":
                for letter in "HTTP/1.0 200 OK\r\nX-Slow: " + "x" * 1000:
                    with contextlib.suppress(OSError):
                        self.wfile.write(letter.encode())
                    if hook.stop.wait(1):
                        return
            if how == "ok":
                hook.bodies.append(json.loads(body))
            if how == "redirect":
                self.send_response(302)
                self.send_header("Location", hook.url + "/elsewhere")
            else:
                self.send_response(200 if how == "ok" else int(how))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            hook.bodies.append({"event": "followed a redirect", "step": 0})
            self.send_response(200)
            self.end_headers()

    with serving(Handler) as server:
        hook.url = f"{server.url}/services/{TOKEN}"
        try:
            yield hook
        finally:
            hook.stop.set()
