"""A stranger's chat template in a process of its own, with limits: the one door to Jinja.

    template, values -> line of JSON -> child (`template_child.py`) -> text | why there is none

A sandbox keeps a template from running code, and not from taking all memory or all time: constants
are folded while it is read, and a loop may have loops in it. The child stays for the next prompt;
one that a limit has ended is begun anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

from olm_data.errors import InputError

CHILD = Path(__file__).with_name("template_child.py")
CPU_SECONDS = 4
WALL_SECONDS = 60  # for where other work leaves the child little of the processor
MEMORY = 1 << 30
"""Bytes of address space, and 16 for each byte of a conversation."""
MOST_BYTES = 1 << 20
"""Of a prompt, and 8 for each byte of its conversation."""


class Rendered(NamedTuple):
    """What came of a template: `text`, `wrong`, `refused` or `failed`, and the words."""

    kind: str
    text: str


class TemplateProcess:
    """One template; threads take turns.

    Args:
        template: Jinja text.
        where: its file, for messages.
    """

    def __init__(self, template: str, where: str) -> None:
        self._template, self._where, self._lock = template, where, threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, values: str = "null") -> Rendered:
        """Return the text for the names and values of a JSON object; null: only see whether it is a
        template.

        Raises:
            InputError: it fails, or goes beyond a limit.
        """
        asked = f'{{"template": {json.dumps(self._template)}, "values": {values}}}\n'.encode()
        with self._lock:
            if self._child is None:
                self._child = _begin()
                weakref.finalize(self, _end, self._child)
            try:
                found = _ask(self._child, asked)
            except OSError as error:
                child, self._child = self._child, None
                raise self._failed(_why(child, error)) from None
        if found.kind == "failed":
            raise self._failed(found.text)
        return found

    def _failed(self, why: str) -> InputError:
        return InputError(
            "the chat template cannot be used",
            where=self._where or None,
            why=why,
            fix="take a template from a source you trust: chat --template, export --chat-template",
        )


def _begin() -> subprocess.Popen[bytes]:
    folders = []
    for name in ("jinja2", "markupsafe"):
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        folders.append(str(Path(found.origin).parents[1]))
    limits = [str(CPU_SECONDS), str(MEMORY), str(MOST_BYTES)]
    return subprocess.Popen(
        [sys.executable, "-I", str(CHILD), *limits, *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
    )


def _ask(child: subprocess.Popen[bytes], asked: bytes) -> Rendered:
    """Return a child's answer.

    Raises:
        OSError: it has ended, or takes too long.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(asked)
    child.stdin.flush()
    until = time.monotonic() + WALL_SECONDS
    head, data = b"", b""
    while b"\n" not in head:
        head += _some(child.stdout, until)
    head, _, data = head.partition(b"\n")
    kind, size = head.decode().split()
    parts = [data]
    left = int(size) - len(data)
    while left:
        parts.append(_some(child.stdout, until))
        left -= len(parts[-1])
    return Rendered(kind, b"".join(parts).decode(errors="surrogatepass"))


def _some(stream: IO[bytes], until: float) -> bytes:
    ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
    if not ready:
        raise TimeoutError(f"it was not done after {WALL_SECONDS} seconds")
    data = os.read(stream.fileno(), 1 << 16)
    if not data:
        raise BrokenPipeError
    return data


def _why(child: subprocess.Popen[bytes], error: OSError) -> str:
    """End a child that has failed; return why it has."""
    late = isinstance(error, TimeoutError)
    if late:
        child.kill()
    code = _end(child)
    if late:
        return str(error)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {CPU_SECONDS} seconds of processor time"
    return f"it ends its process, or needs more than {MEMORY >> 20:,} MiB of memory"


def _end(child: subprocess.Popen[bytes]) -> int:
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return child.wait()
