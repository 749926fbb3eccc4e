"""How a conversation becomes the prompt of a model: a Jinja template, or plain words.

    messages -> template -> text -> the answer goes on from there, to a stop string

The templates of transformers (`chat_template.jinja`) work as they are: they find the same names.
They run in a sandbox, in a process with limits: one can write text, and do nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from olm_data.chat_template import MAX_TEMPLATE, TemplateProcess
from olm_data.errors import InputError, UsageError, printable
from olm_data.regular_files import read_regular

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
