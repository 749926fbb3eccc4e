"""How a conversation becomes the prompt of a model: a Jinja template, or plain words.

    messages -> template -> text -> the answer goes on from there, to a stop string

The templates of transformers (`chat_template.jinja`) work as they are: they find the same names.
They run in a sandbox, in a process with limits: one can write text, and do nothing else.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from olm_data.errors import InputError, UsageError, printable
from olm_data.extras import needs
from olm_data.regular_files import read_regular

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
            fix="take a template from a source you trust: chat --template, export --chat-template",
        )


def _begin() -> subprocess.Popen[bytes]:
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


MAX_TEMPLATE = 1 << 20
"""Bytes of a template's file."""
PLAIN_STOPS = ("\nUser:",)


class Message(msgspec.Struct, frozen=True):
    """A turn: who said what. Roles are "system", "user" and "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatTemplate:
    """Makes prompts of conversations.

    Attributes:
        template: of Jinja, in its process; None: lines that begin with `User:` and `Assistant:`.
        special: text of special tokens by the names that templates know: `eos_token`.
        whole: its prompts spell the token that begins them, if any does; none is put before them.
        where: its file, for messages.
    """

    template: TemplateProcess | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    where: str = ""

    @classmethod
    def read(cls, path: Path, special: Mapping[str, str], *, whole: bool = False) -> ChatTemplate:
        """Read a template from a file.

        Raises:
            InputError: there is no such file, or it is no template.
        """
        try:
            text = read_regular(path, MAX_TEMPLATE).decode()
        except FileNotFoundError as error:
            raise InputError("there is no such template", where=str(path)) from error
        except UnicodeDecodeError as error:
            raise _no_template(error, str(path)) from None
        return cls.of(text, special, str(path), whole=whole)

    @classmethod
    def of(
        cls, text: str, special: Mapping[str, str], where: str, *, whole: bool = False
    ) -> ChatTemplate:
        """Return the template that a text is.

        Raises:
            InputError: it is no template, or goes beyond the limits of its process.
        """
        with needs("a chat template", where=where):
            import jinja2  # noqa: F401
        process = TemplateProcess(text, where)
        found = process.render()
        if found.kind == "wrong":
            raise _no_template(found.text, where)
        return cls(process, special, whole, where)

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer, besides those that are asked for."""
        return PLAIN_STOPS if self.template is None else ()

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text that an answer goes on from.

        Raises:
            UsageError: the template refuses the conversation.
            InputError: it fails, or goes beyond the limits of its process.
        """
        if self.template is None:
            return "".join(map(_plain, messages)) + "Assistant:"
        values = {
            "messages": [msgspec.to_builtins(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "bos_token": "",
            "eos_token": "",
            **self.special,
        }
        found = self.template.render(json.dumps(values))
        if found.kind == "text":
            return found.text
        raise UsageError(
            f"the template does not take this conversation: {printable(found.text)[:200]}",
            where=self.where or None,
        )


def _no_template(error: object, where: str) -> InputError:
    return InputError(f"this is no Jinja template: {printable(str(error))[:200]}", where=where)


def _plain(message: Message) -> str:
    if message.role == "system":
        return f"{message.content}\n\n"
    return f"{message.role.capitalize()}: {message.content.strip()}\n"
