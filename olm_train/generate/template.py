"""How a conversation becomes the prompt of a model: a Jinja template, or plain words.

    messages -> template -> text -> the answer goes on from there, to a stop string

The templates of transformers (`chat_template.jinja`) work as they are. They run in a sandbox: one
can write text, and do nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from olm_data.errors import InputError, UsageError, printable
from olm_data.extras import needs
from olm_data.regular_files import read_regular

if TYPE_CHECKING:
    from jinja2 import Template

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
        template: of Jinja; None: lines that begin with `User:` and `Assistant:`.
        eos: text of the token that ends a document, for the template.
        where: its file, for messages.
    """

    template: Template | None = None
    eos: str = ""
    where: str = ""

    @classmethod
    def read(cls, path: Path | None, eos: str) -> ChatTemplate:
        """Read a template; None: the plain one.

        Raises:
            InputError: there is no such file, or it is no template.
        """
        if path is None:
            return cls(eos=eos)
        try:
            text = read_regular(path, MAX_TEMPLATE).decode()
        except FileNotFoundError as error:
            raise InputError("there is no such template", where=str(path)) from error
        except UnicodeDecodeError as error:
            raise _no_template(error, str(path)) from None
        return cls.of(text, eos, str(path))

    @classmethod
    def of(cls, text: str, eos: str, where: str) -> ChatTemplate:
        """Return the template that a text is.

        Raises:
            InputError: it is no template.
        """
        with needs("a chat template", where=where):
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        try:
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            environment.globals["raise_exception"] = _refuse
            return cls(environment.from_string(text), eos, where)
        except TemplateError as error:
            raise _no_template(error, where) from None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer, besides those that are asked for."""
        return PLAIN_STOPS if self.template is None else ()

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text that an answer goes on from.

        Raises:
            UsageError: the template refuses the conversation.
        """
        if self.template is None:
            return "".join(map(_plain, messages)) + "Assistant:"
        from jinja2 import TemplateError

        try:
            return self.template.render(
                messages=[msgspec.to_builtins(message) for message in messages],
                add_generation_prompt=True,
                bos_token="",  # it is put before each prompt, where the model knows one
                eos_token=self.eos,
            )
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"the template does not take this conversation: {printable(str(error))[:200]}",
                where=self.where or None,
            ) from None


def _no_template(error: Exception, where: str) -> InputError:
    return InputError(f"this is no Jinja template: {printable(str(error))[:200]}", where=where)


def _plain(message: Message) -> str:
    if message.role == "system":
        return f"{message.content}\n\n"
    return f"{message.role.capitalize()}: {message.content.strip()}\n"


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateRuntimeError

    raise TemplateRuntimeError(message)
