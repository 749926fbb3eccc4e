"""Chat templates: Jinja in its sandbox, with the names that transformers gives them.

    tokenizer_config.json | chat_template.jinja | FILE | chatml, tulu --find_template--> text, names
    Template(text).render(conversation) -> the one render

The clock is not there: a template that tests for it takes its own date, one that does not is
refused, as the bytes of a dataset do not depend on the day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from olm_data.bounded_json import MalformedJson, decode_configuration
from olm_data.errors import InputError, UsageError, said_by, suggest
from olm_data.extensions.chat.conversations import Conversation, Refused
from olm_data.extras import needs
from olm_data.regular_files import read_regular
from olm_data.storage.hub import hub_file
from olm_data.tokenizer.tokenizer import HUB_ALIASES

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

TOKENIZER = "tokenizer"
BUILT_IN = ("chatml", "tulu")
CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"
MAX_TEMPLATE = 1 << 20
"""Bytes of a template's file."""
BEGIN, END = "\ufdd2", "\ufdd3"
"""Around what `{% generation %}` encloses."""


def find_template(name: str, tokenizer: str) -> tuple[str, dict[str, str]]:
    """Return the text of a template, and the special tokens of a tokenizer's config by name.

    Args:
        name: `tokenizer`, one of `BUILT_IN`, or a file.
        tokenizer: file, folder or hub id.

    Raises:
        UsageError: there is none.
        InputError: a file is damaged.
    """
    beside = _beside(tokenizer)
    try:
        config = decode_configuration(beside(CONFIG) or b"{}")
    except MalformedJson as error:
        raise InputError(
            f"{CONFIG} is not a JSON object", where=tokenizer, why=str(error)
        ) from error
    special = {}
    for key, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str):
            special[key] = token
    if name in BUILT_IN:
        return (files(__package__) / "templates" / f"{name}.jinja").read_text(), special
    if name != TOKENIZER:
        try:
            return read_regular(Path(name), MAX_TEMPLATE).decode(), special
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise UsageError(
                f"no chat template {name!r}",
                where="--chat-template",
                why=said_by(error),
                fix=f"give a file, or {suggest(name, [TOKENIZER, *BUILT_IN])}",
            ) from error
    own = beside(FILE)
    found = config.get("chat_template") if own is None else own.decode(errors="replace")
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UsageError(
            "the tokenizer has no chat template",
            where=tokenizer,
            why=f"there is no {FILE} beside it, and none in {CONFIG}",
            fix=f"--chat-template FILE, or one of {', '.join(BUILT_IN)}",
        )
    return found, special


def _beside(tokenizer: str) -> Any:
    """Return what reads a file beside a tokenizer, by its name; None where it is not there."""
    path = Path(tokenizer)
    if path.exists():
        folder = path if path.is_dir() else path.parent

        def read(name: str) -> bytes | None:
            there = (folder / name).is_file()
            return read_regular(folder / name, 64 * MAX_TEMPLATE) if there else None

        return read
    return lambda name: hub_file(HUB_ALIASES.get(tokenizer, tokenizer), name)


class Template:
    """A template that is ready.

    Args:
        text: of Jinja.
        special: special tokens by the names that it knows.

    Raises:
        InputError: it is no template.
        MissingExtra: jinja2 is not installed.
    """

    def __init__(self, text: str, special: Mapping[str, str]) -> None:
        with needs("a chat template", where="--format chat"):
            from jinja2 import TemplateError
        try:
            self._template = _environment().from_string(text)
        except TemplateError as error:
            raise InputError(
                "this is no chat template", where="--chat-template", why=said_by(error)
            ) from error
        self._special = dict(special)

    def render(self, given: Conversation, *, prompt: bool = False) -> str:
        """Return the text of a conversation.

        Args:
            prompt: whether the header of an answer follows.

        Raises:
            Refused: the template does not take it.
        """
        values = self._special | given.variables
        try:
            return str(
                self._template.render(
                    **values,
                    messages=given.messages,
                    tools=given.tools or None,
                    documents=None,
                    add_generation_prompt=prompt,
                )
            )
        except Exception as error:
            raise Refused("template", said_by(error)[:200] or type(error).__name__) from error


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateRuntimeError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

            def mark(text: str) -> nodes.Node:
                return nodes.Output([nodes.TemplateData(text)])

            return [mark(BEGIN), nodes.Scope(body), mark(END)]

    def refuse(message: str) -> NoReturn:
        raise TemplateRuntimeError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = refuse
    return made


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
