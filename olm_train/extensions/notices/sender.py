"""Sends messages in a thread of its own: whoever has one to send never waits for a server.

    put --(list in memory)--> thread: told already? too many? -> POST, 5 s -> noted as sent
                                                       failed: three tries -> a warning, once

A message whose answer is lost is sent again, so it may arrive twice; it is never lost without a
word. Never: follow a redirect, read an answer, or show the address.

What a run has told already, so that a restart does not tell it again.

    <run>/notified.json        written by the run, `callbacks.notifier`
    <run>/watched.json         written by `olm-train notify`

Read and written here only, each by one process at a time.
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from olm_data.bounded_json import MalformedJson, decode
from olm_data.errors import OlmError, ResourceError, StorageError, printable
from olm_data.redaction import redacted
from olm_data.regular_files import read_regular
from olm_data.run_log.lines import replace_file
from olm_train.callbacks.notice import ENDS, Event, Notice, payload

WATCHED = "watched.json"
MOST_KEPT = 1000
"""Messages that are remembered, the newest."""
HOUR = 3600.0


class Told(msgspec.Struct, frozen=True):
    """A message that was sent: its event and step, and when (seconds since 1970)."""

    event: Event
    step: Annotated[int, Meta(ge=0)]
    time: float


class Notified(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file, oldest message first."""

    told: tuple[Told, ...] = ()
    version: Literal[1] = 1


class SentLog:
    """The messages of a run; those of earlier starts are read at once.

    Args:
        path: `NOTIFIED` or `WATCHED` in the folder of the run.

    Attributes:
        note: why the file could not be read, None where it could; then it begins anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.note: str | None = None
        self._content = Notified()
        try:
            if path.exists():
                self._content = decode(read_regular(path), Notified)
        except (MalformedJson, OlmError, OSError) as error:
            said = error.what if isinstance(error, OlmError) else printable(str(error))
            self.note = f"{path} cannot be read, messages may be sent again: {said[:200]}"

    def has(self, notice: Notice) -> bool:
        """Whether this was told: the same event at the same step."""
        return any((t.event, t.step) == (notice.event, notice.step) for t in self._content.told)

    def in_last_hour(self, now: float) -> int:
        """Return how many messages were sent in the hour before `now`."""
        return sum(1 for told in self._content.told if now - HOUR < told.time <= now)

    def add(self, notice: Notice, now: float) -> None:
        """Note that a message was sent.

        Raises:
            OSError: the file cannot be written; it is remembered in memory.
        """
        told = Told(notice.event, notice.step, now)
        self._content = Notified(told=(*self._content.told, told)[-MOST_KEPT:])
        replace_file(self._path, msgspec.json.encode(self._content))


TIMEOUT = 5.0
"""Seconds for each part of a request that waits for the server."""
WAITS = (0.0, 1.0, 3.0)
"""Seconds before each try of a message."""
CLOSE_SECONDS = 20.0
"""How long the end of a run may wait for messages."""
MOST_WAITING = 100


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A webhook that moved is an error: where it moved to is nobody's choice but the user's."""

    def redirect_request(
        self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


class Sender:
    """A thread, and the messages that it has yet to send.

    Args:
        url: of the webhook.
        sent: what was told before.
        say: prints a line; from the thread.
        max_per_hour: messages within any hour, at least 2; the last one of them is kept for how
            the run ended.
    """

    def __init__(
        self, url: str, sent: SentLog, say: Callable[[str], None], *, max_per_hour: int
    ) -> None:
        self._url, self._sent, self._say, self._most = url, sent, say, max_per_hour
        self._waiting: deque[Notice] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._left_out = 0  # beyond the limit, since the last message that was sent
        self._failures = 0  # messages in a row
        self._given_up = False  # it was said what is not sent
        self._thread = threading.Thread(target=self._run, name="olm-notices", daemon=True)
        self._thread.start()

    def put(self, notice: Notice) -> None:
        """Take a message to send, and return at once; how a run ended goes first."""
        with self._changed:
            if notice.event in ENDS:
                self._waiting.appendleft(notice)
            elif len(self._waiting) < MOST_WAITING:
                self._waiting.append(notice)
            else:
                self._left_out += 1
            self._changed.notify()

    def close(self, within: float = CLOSE_SECONDS) -> None:
        """Send what waits, and return after so many seconds whether that is done or not."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(within)
        if self._thread.is_alive():
            with self._changed:
                self._given_up = True
                left = [*self._waiting]
                self._waiting.clear()
            names = ", ".join(["the one being sent", *(notice.event for notice in left)])
            self._say(f"warning: messages not sent within {within:g} s: {names}")
        if self._left_out:
            self._say(f"note: {self._left_out:,} messages were left out: max_per_hour {self._most}")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing.is_set():
                        return
                    self._changed.wait()
                notice = self._waiting.popleft()
            if not self._sent.has(notice):
                self._send(notice)

    def _send(self, notice: Notice) -> None:
        now = time.time()
        most = self._most if notice.event in ENDS else self._most - 1
        if self._sent.in_last_hour(now) >= most:
            with self._changed:
                self._left_out += 1
            return
        before = self._left_out
        failure = self._tried(notice, before)
        if failure is None:
            self._failures = 0
            with self._changed:
                self._left_out -= before  # those that were left out meanwhile are still to be told
            try:
                self._sent.add(notice, now)
            except (OSError, ResourceError, StorageError) as error:
                self._say(f"warning: a message was sent and may be sent again: {error}")
            return
        self._failures += 1
        if not self._given_up and (self._failures == 1 or notice.event in ENDS):
            self._say(f"warning: the message {notice.event!s} could not be sent: {failure}")

    def _tried(self, notice: Notice, left_out: int) -> str | None:
        """Return what the last try failed with, None where one was taken.

        Args:
            left_out: messages before it that were not sent.
        """
        if left_out:
            more = f"{notice.text}\n({left_out:,} messages before this one were left out)"
            notice = msgspec.structs.replace(notice, text=more)
        body, failure = payload(self._url, notice), "it was not tried"
        for wait in WAITS:
            self._closing.wait(wait)
            try:
                post(self._url, body)
            except urllib.error.HTTPError as error:
                failure = f"the webhook answered {error.code}"
                error.close()
                if error.code < 500 and error.code not in (408, 429):
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = getattr(error, "reason", error)
                kind = type(reason).__name__ if isinstance(reason, Exception) else ""
                failure = redacted(printable(f"{kind}: {reason}".removeprefix(": ")))[:200]
            else:
                return None
        return failure


def post(url: str, body: bytes, timeout: float = TIMEOUT) -> None:
    """Send a JSON body to a webhook.

    Raises:
        urllib.error.HTTPError: it answered something but 2xx.
        OSError, http.client.HTTPException: there was no whole answer.
    """
    headers = {"Content-Type": "application/json", "User-Agent": "olm-train"}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    opener = urllib.request.build_opener(_NoRedirect)
    with opener.open(request, timeout=timeout):
        pass
