"""A row of a chat dataset as one conversation, whatever form it has.

messages | conversations (ShareGPT) | prompt, completion  --conversation-->  Conversation
Conversation --text--> the JSON that stands for it from reading to encoding, and is its identity
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from olm_data.bounded_json import JsonObject
from olm_data.decoding import convert

MESSAGES, SHARED = "messages", "conversations"
FLAGS = ("trainable", "train", "loss", "loss_mask", "weight")
"""Names of the flag of a message that overrules `--train`; 0 or 1, or a truth value."""

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
}
"""ShareGPT's names of roles."""

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_MARKS = re.compile("[\ufdd0-\ufdef]")


class Refused(Exception):
    """A row that is no document: the key of `DROP_REASONS`, and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Conversation(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a template is given, and which messages say themselves whether they are trained.

    Attributes:
        messages: each with `role` and `content`; maybe `tool_calls`, whose arguments are objects.
        tools: that the assistant may call.
        variables: more values for the template, by name.
        flags: one a message; None where it does not say. Empty: none does.
    """

    messages: list[JsonObject]
    tools: list[Any] = []
    variables: JsonObject = {}
    flags: list[bool | None] = []

    @property
    def text(self) -> str:
        """The conversation as JSON, keys in the order of the row."""
        return json.dumps(msgspec.to_builtins(self), ensure_ascii=False, separators=(",", ":"))

    def cut(self, chosen: Sequence[int]) -> Conversation:
        """Return the conversation with some of its messages."""
        flags = [self.flags[k] for k in chosen] if self.flags else []
        messages = [self.messages[k] for k in chosen]
        return msgspec.structs.replace(self, messages=messages, flags=flags)


def parse(text: str) -> Conversation:
    """Return the conversation whose `text` this is."""
    return convert(json.loads(text), Conversation)


def conversation(row: JsonObject, column: str) -> Conversation:
    """Return the conversation of a row.

    Args:
        column: where the messages are, if there is such a column.

    Raises:
        Refused: there is none.
    """
    found = row.get(column)
    if found is None:
        found = next((row[name] for name in (MESSAGES, SHARED) if row.get(name)), None)
    if found is None and row.get("completion") is not None:
        prompt = _turns(row.get("prompt"), "user")
        asked = [message | {"trainable": _flag(message) or False} for message in prompt]
        found = asked + _turns(row["completion"], "assistant")
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise Refused("bad_chat", f"there are no {column}: {', '.join(map(repr, list(row)[:12]))}")
    messages, flags = [], []
    for number, message in enumerate(found):
        made, flag = _message(message, f"message {number}")
        messages.append(made)
        flags.append(flag)
    if isinstance(row.get("system"), str) and row["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
        flags.insert(0, None)
    whole = Conversation(
        messages=messages,
        tools=_loaded(row.get("tools"), list) or [],
        variables=_loaded(row.get("chat_template_kwargs"), dict) or {},
        flags=flags if any(flag is not None for flag in flags) else [],
    )
    if _MARKS.search(whole.text):
        raise Refused("bad_chat", "it holds a noncharacter (U+FDD0 to U+FDEF), which is no text")
    return whole


def _turns(value: Any, role: str) -> list[JsonObject]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return list(value)
    raise Refused("bad_chat", "prompt and completion are neither texts nor lists of messages")


def _message(given: Any, where: str) -> tuple[JsonObject, bool | None]:
    """Return a message as templates know it, and its flag."""
    if not isinstance(given, Mapping):
        raise Refused("bad_chat", f"{where} is no object")
    message = {name: value for name, value in given.items() if value is not None}
    flag = _flag(message, where)
    for name in FLAGS:
        message.pop(name, None)
    role = message.pop("role", None) or message.pop("from", None)
    content = message.pop("content", None)
    content = message.pop("value", "") if content is None else content
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise Refused("bad_chat", f"{where} has no role")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise Refused("bad_chat", f"{where} has parts that are no text")
    elif not isinstance(content, str):
        raise Refused("bad_chat", f"the content of {where} is neither text nor a list of texts")
    made = {"role": ROLES.get(role, role), "content": content, **message}
    calls = _loaded(message.get("tool_calls"), list)
    if calls:
        made["tool_calls"] = [_call(call, where) for call in calls]
    if made["role"] == "assistant" and not (leaves(made) or calls):
        raise Refused("bad_chat", f"{where}, of the assistant, is empty")
    return made, flag


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates want them."""
    if not isinstance(call, Mapping):
        raise Refused("bad_chat", f"a tool call of {where} is no object")
    inner = call.get("function", call)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise Refused("bad_chat", f"a tool call of {where} has no name")
    function = {**inner, "arguments": _loaded(inner.get("arguments", {}), dict)}
    return {**call, "function": function} if "function" in call else function


def _flag(message: JsonObject, where: str = "a message") -> bool | None:
    """Return whether a message says that it is trained; None: it says nothing."""
    found = [message[name] for name in FLAGS if message.get(name) is not None]
    if any(value not in (0, 1) for value in found) or len({bool(value) for value in found}) > 1:
        raise Refused("bad_chat", f"{where} has a flag {found} that is neither 0 nor 1")
    return bool(found[0]) if found else None


def _loaded(value: Any, kind: type) -> Any:
    """Return a value that may have been written as JSON; as it is where it is something else."""
    if isinstance(value, str):
        try:
            made = json.loads(value)
        except ValueError:
            return value
        return made if isinstance(made, kind) else value
    return value


def leaves(message: JsonObject) -> list[str]:
    """Return the texts that are the content of a message, without the empty ones."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return [text for text in texts if text.strip()]
