"""Chat templates of conversations to train on: where they are, and the render of one.

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
from typing import Any

from olm_data.chat_template import MAX_TEMPLATE, TemplateProcess
from olm_data.errors import InputError, UsageError, printable, said_by, suggest
from olm_data.extensions.chat.conversations import Conversation, Refused
from olm_data.regular_files import read_regular
from olm_data.storage.hub import hub_file
from olm_data.tokenizer.tokenizer import CONFIG, HUB_ALIASES, named_tokens, read_config

TOKENIZER = "tokenizer"
BUILT_IN = ("chatml", "tulu")
FILE = "chat_template.jinja"


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
    config = read_config(beside(CONFIG), tokenizer)
    special = named_tokens(config)
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
        InputError: it is no template, or goes beyond the limits of its process.
        MissingExtra: jinja2 is not installed.
    """

    def __init__(self, text: str, special: Mapping[str, str]) -> None:
        self._process = TemplateProcess(text, "--chat-template", for_data=True)
        found = self._process.render()
        if found.kind == "wrong":
            raise InputError(
                "this is no chat template", where="--chat-template", why=printable(found.text)
            )
        self._special = dict(special)

    def render(self, given: Conversation, *, prompt: bool = False) -> str:
        """Return the text of a conversation.

        Args:
            prompt: whether the header of an answer follows.

        Raises:
            Refused: the template does not take it, or goes beyond the limits of its process.
        """
        values = {
            **self._special,
            **given.variables,
            "messages": given.messages,
            "tools": given.tools or None,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        try:
            found = self._process.render(json.dumps(values))
        except InputError as error:
            raise Refused("template", error.why or error.what) from error
        if found.kind == "refused":
            raise Refused("template", found.text[:200])
        return found.text
