"""Chat templates in a process with limits: they can write text, and do nothing else.

    template, values --a line of JSON--> chat_template_child.py --> text | wrong | refused | failed

The templates of transformers (`chat_template.jinja`) work as they are: they find the same names.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from olm_data.errors import InputError
from olm_data.extras import needs

CHILD = Path(__file__).with_name("chat_template_child.py")
MAX_TEMPLATE = 1 << 20
"""Bytes of a template's file."""
BEGIN, END = "\ufdd2", "\ufdd3"
"""Around what `{% generation %}` encloses, in renders for data."""
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
        for_data: its renders are the same on all days, as there is no clock, and what
            `{% generation %}` encloses is marked in them.
    """

    def __init__(self, template: str, where: str, *, for_data: bool = False) -> None:
        self._asked = f'{{"template": {json.dumps(template)}, "for_data": {json.dumps(for_data)}, '
        self._where, self._lock = where, threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, values: str = "null") -> Rendered:
        """Return the text for the names and values of a JSON object; null: only see whether it is a
        template.

        Raises:
            InputError: it fails, or goes beyond a limit.
            MissingExtra: jinja2 is not installed.
        """
        asked = f'{self._asked}"values": {values}}}\n'.encode()
        with self._lock:
            if self._child is None:
                self._child = _begin(self._where)
                weakref.finalize(self, _end, self._child)
            found = _ask(self._child, asked)
            if found is None:
                child, self._child = self._child, None
                raise self._failed(_why(_end(child)))
        if found.kind == "failed":
            raise self._failed(found.text)
        return found

    def _failed(self, why: str) -> InputError:
        return InputError(
            "the chat template cannot be used",
            where=self._where or None,
            why=why,
            fix="take a template from a source you trust: --template, or --chat-template",
        )


def _begin(where: str) -> subprocess.Popen[bytes]:
    with needs("a chat template", where=where or None):
        import jinja2  # noqa: F401
    folders = []
    for name in ("jinja2", "markupsafe"):
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        folders.append(str(Path(found.origin).parents[1]))
    limits = map(str, (WALL_SECONDS, CPU_SECONDS, MEMORY, MOST_BYTES))
    return subprocess.Popen(
        [sys.executable, "-I", str(CHILD), *limits, *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
    )


def _ask(child: subprocess.Popen[bytes], asked: bytes) -> Rendered | None:
    """Return a child's answer; None: it has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(asked)
        child.stdin.flush()
        return Rendered(*json.loads(child.stdout.readline()))
    except (OSError, ValueError):
        return None


def _why(code: int) -> str:
    """Return why a child has ended."""
    if code == -signal.SIGALRM:
        return f"it was not done after {WALL_SECONDS} seconds"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {CPU_SECONDS} seconds of processor time"
    return f"it ends its process, or needs more than {MEMORY >> 20:,} MiB of memory"


def _end(child: subprocess.Popen[bytes]) -> int:
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return child.wait()
