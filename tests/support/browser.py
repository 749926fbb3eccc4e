"""Chromium without a window, steered over its debugging pipe: pages, scripts, clicks, what it says.

with browser() as chromium: page = chromium.open(url); page.wait("..."); page.click("#button")
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.polling import wait_until

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no chromium here: apt-get install chromium (.ci/run does so)"
)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 600.0
BAD = ("Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """A running Chromium.

    Args:
        process: it; reads commands from its descriptor 3 and writes answers to 4.
        commands, answers: our ends of them.

    Attributes:
        problems: exceptions of scripts, errors of the console, what a policy refused.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._poll = select.poll()  # unlike select, for descriptors above 1,024 too
        self._poll.register(answers, select.POLLIN)
        self._rest, self._number = b"", 0
        self._open: list[str] = []
        self.problems: list[str] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, url: str, *, width: int = 1200, height: int = 900) -> Page:
        """Open a page in a tab of its own."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._open.append(target)
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.ask(f"{domain}.enable", session)
        self.ask(
            "Emulation.setDeviceMetricsOverride", session,
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.ask("Page.navigate", session, url=url)
        return Page(self, session)

    def close_pages(self) -> None:
        """Close the tabs, and forget what was wrong in them."""
        while self._open:
            self.ask("Target.closeTarget", targetId=self._open.pop())
        self.problems.clear()

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not self._poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError("chromium does not answer")
            data = os.read(self._answers, 1 << 16)
            assert data, "chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        wrong = event.get("params", {}).get("type") in ("error", "warning")
        if event.get("method") in BAD or (
            event.get("method") == "Runtime.consoleAPICalled" and wrong
        ):
            self.problems.append(json.dumps(event["params"])[:600])


class Page:
    """A page in a browser."""

    def __init__(self, chromium: Browser, session: str) -> None:
        self._chromium, self._session = chromium, session

    def js(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self._chromium.ask(
            "Runtime.evaluate",
            self._session,
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Return when an expression is true."""
        wait_until(lambda: self.js(f"!!({expression})"), expression)

    def text(self) -> str:
        """Return what a reader sees."""
        return str(self.js("document.body.innerText"))

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Click on an element, at a share of its width and height."""
        box = self.js(
            f"(() => {{ const node = document.querySelector({selector!r});"
            "node.scrollIntoView({block: 'center'}); const b = node.getBoundingClientRect();"
            "return [b.x, b.y, b.width, b.height] })()"
        )
        place = {"x": box[0] + across * box[2], "y": box[1] + down * box[3]}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._chromium.ask(
                "Input.dispatchMouseEvent", self._session,
                type=kind, button="none" if kind == "mouseMoved" else "left", clickCount=1, **place,
            )  # fmt: skip


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium with a profile of its own, and end it."""
    assert PROGRAM is not None
    theirs, commands = os.pipe()
    answers, mine = os.pipe()
    # Ours are moved out of the way: in the child they have to be 3 and 4.
    script = f'exec "$@" 3<&{theirs} 4>&{mine}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", script, "-", PROGRAM, *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(theirs, mine),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(mine)
        try:
            yield Browser(commands, answers)
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(answers)
