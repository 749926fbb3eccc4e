"""How a conversation becomes the prompt of a model: a Jinja template, or plain words.

    messages -> template -> text -> the answer goes on from there, to a stop string

The templates of transformers (`chat_template.jinja`) work as they are: they find the same names.
They run in a sandbox: one can write text, and do nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

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
        special: text of special tokens by the names that templates know: `eos_token`.
        whole: its prompts spell the token that begins them, if any does; none is put before them.
        where: its file, for messages.
    """

    template: Template | None = None
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
            InputError: it is no template.
        """
        with needs("a chat template", where=where):
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        try:
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True,
                lstrip_blocks=True,
                extensions=["jinja2.ext.loopcontrols", _generation_tag()],
            )
            environment.filters["tojson"] = _to_json
            environment.globals["raise_exception"] = _refuse
            environment.globals["strftime_now"] = _now
            return cls(environment.from_string(text), special, whole, where)
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
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **{"bos_token": "", "eos_token": "", **self.special},
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


def _generation_tag() -> type[Any]:
    """Return what makes `{% generation %}` known, a mark of the answers to train on: it is passed
    over."""
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; that of Jinja escapes what HTML must."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateRuntimeError

    raise TemplateRuntimeError(message)
