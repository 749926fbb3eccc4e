"""Where in the one render of a conversation each message stands, and what the model says itself.

    conversation --marks in its texts--> render --marks out--> the very render without marks: proved
                                               |
    Render: text, the template's special tokens, and of each message: where its answer begins
    (behind the header, or where `{% generation %}` does), its content, the token that ends its turn

The marks are noncharacters, which stand in no text. What spells a special token in a message is
broken by one, so that those which are found are the template's. A render that marks change in
another way than by themselves tells nothing, and its row is dropped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from olm_data.chat_template import BEGIN, END
from olm_data.extensions.chat.conversations import Conversation, Refused, leaves
from olm_data.extensions.chat.template import Template

SPELLED = "\ufdd1"
"""Behind the first character of what spells a special token, or may begin to."""

END_NAMES = ("<|eom_id|>", "<|call|>", "<|return|>")
"""Tokens that end a turn in which a tool is called, where a template has them."""

THINKING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with its thoughts."""

_MARK = re.compile("[\ufdd1-\ufdd3]|\ufdd4([0-9]+)\ufdd5|\ufdd6([0-9]+)\ufdd7")
_PARTED = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)
_CLOSED = re.compile(r".*</think>\s*(?=\S)", re.DOTALL)
Span = tuple[int, int]


@dataclass(frozen=True)
class Turn:
    """A message in the text of a render.

    Attributes:
        role: of the message.
        answer: where what the model says begins; for other roles, the content.
        content: where its content, or the name of its first tool, begins.
        stop: where its content, or the name of its last tool, stops.
        end: the token that ends it, None where none does.
    """

    role: str
    answer: int
    content: int
    stop: int
    end: Span | None


@dataclass(frozen=True)
class Render:
    """The render of a conversation.

    Attributes:
        text: as the template gives it.
        special: the template's special tokens in it, in order.
        spelled: how often the text of a message spells one.
        turns: one a message.
    """

    text: str
    special: list[Span]
    spelled: int
    turns: list[Turn]


class Marker:
    """Finds messages in renders of one template.

    Args:
        template: the template.
        special: the tokenizer's special tokens.
        eos: the tokenizer's end token, if it has one.
    """

    def __init__(self, template: Template, special: Iterable[str], eos: str | None) -> None:
        self.template = template
        names = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        begun = {name[:n] for name in names for n in range(1, len(name))}
        joined = "|".join(map(re.escape, sorted(begun, key=len, reverse=True))) or r"(?!)"
        self._begun = re.compile(rf"(?:{joined})(?=\s*\Z)")
        self._ends = {name for name in (eos, *END_NAMES) if name in names}
        self._header = self._whole_header = ""
        self._learn()

    def _learn(self) -> None:
        """Learn the header of an answer, and what ends one, from a conversation of our own."""
        said = [("user", "zq1z"), ("assistant", "zq2z"), ("user", "zq3z"), ("assistant", "zq4z")]
        forms: list[Callable[[str], Any]] = [str, lambda text: [{"type": "text", "text": text}]]
        text = ""
        for form in forms:
            if "zq2z" in text:
                break  # else it takes lists of parts alone
            probe = Conversation(messages=[{"role": r, "content": form(c)} for r, c in said])
            asked = probe.cut([0])
            try:
                before = _bare(self.template.render(asked))
                prompt = _bare(self.template.render(asked, prompt=True))
                text = _bare(self.template.render(probe))
            except Refused:
                return  # a template that takes no such talk has headers found by its prefixes
        for answer in ("zq2z", "zq4z"):
            behind = text.partition(answer)[2].lstrip()
            if found := self._special.match(behind):
                self._ends.add(found[0])
        if prompt.startswith(before) and text.startswith(before) and "zq2z" in text:
            self._whole_header = prompt[len(before) :]
            behind = text[len(before) : text.find("zq2z")]
            same = [a == b for a, b in zip(self._whole_header, behind, strict=False)]
            self._header = behind[: (*same, False).index(False)]

    def render(self, given: Conversation) -> Render:
        """Return the render of a conversation with its messages found in it.

        Raises:
            Refused: the template does not take it, leaves something of it out, or changes what it
                is given so that it cannot be told what is where.
        """
        text = self.template.render(given)
        marked = self.template.render(self._marked(given))
        kept: list[str] = []  # the text with what breaks spelled tokens
        size = place = 0
        spelled: list[int] = []
        found = _Marks(given, BEGIN in text)
        for mark in _MARK.finditer(marked):
            kept.append(marked[place : mark.start()])
            size += mark.start() - place
            place = mark.end()
            if mark[1] or mark[2]:
                (found.starts if mark[1] else found.stops)[int(mark[1] or mark[2])].append(size)
            elif mark[0] == SPELLED:
                kept.append(SPELLED)
                spelled.append(size + len(spelled))
            elif mark[0] == BEGIN:
                found.blocks.append([size, size])
            else:
                found.blocks[-1][1] = size
        kept.append(marked[place:])
        whole = "".join(kept)
        text = _bare(text)
        if whole.replace(SPELLED, "") != text:
            raise Refused("span", "the template changes its messages, so none is found in its text")
        special = [
            (match.start() - (before := bisect_left(spelled, match.start())), match.end() - before)
            for match in self._special.finditer(whole)
        ]
        every = sum(1 for _ in self._special.finditer(text))
        made = Render(text, special, max(0, every - len(special)), [])
        for number in range(len(given.messages)):
            made.turns.append(self._turn(number, made, found))
        for tool in given.tools:
            name = tool.get("function", tool).get("name") if isinstance(tool, dict) else None
            if isinstance(name, str) and name not in text:
                raise Refused("template", f"the template leaves out the tool {name!r}")
        return made

    def _turn(self, number: int, made: Render, found: _Marks) -> Turn:
        text, message = made.text, found.given.messages[number]
        role, starts, stops = message["role"], found.starts, found.stops
        what = f"message {number} ({role})"
        wanted = len(leaves(message)) + len(message.get("tool_calls") or ())
        if not wanted:
            before = made.turns[-1].stop if made.turns else 0
            return Turn(role, before, before, before, None)
        if len(stops[number]) != wanted or not starts[number]:
            raise Refused("template", f"the template leaves out {what}, or has it twice")
        content, stop = min(starts[number]), max(stops[number])
        tail = _CLOSED.sub("", message["content"], 1) if isinstance(message["content"], str) else ""
        if tail.strip() not in text[content:stop]:
            raise Refused("span", f"the template changes the text of {what}")
        last = made.turns[-1].stop if made.turns else 0
        others = [place for n, places in enumerate(starts) if n > number for place in places]
        until = min(others, default=len(text))
        if not last <= content <= stop <= until:
            raise Refused("span", f"{what} stands in another place than its own")
        after = [(a, b) for a, b in made.special if stop <= a and b <= until]
        end = next((span for span in after if text[slice(*span)] in self._ends), None)
        answer = content
        if role == "assistant":
            answer = self._answer(number, what, text, last, content, found)
            if any(answer <= a < content and text[a:b] in self._ends for a, b in made.special):
                raise Refused("span", f"the header of {what} is not found")
            self._require_thoughts(found.given, number, text[answer:stop])
        return Turn(role, answer, content, stop, end)

    def _answer(
        self, number: int, what: str, text: str, floor: int, content: int, found: _Marks
    ) -> int:
        """Return where what the model says begins in a message of the assistant."""
        if found.generation:
            own = [begin for begin, stop in found.blocks if begin <= content <= stop]
            if not own:
                raise Refused("span", f"{what} is in no generation block of the template")
            return own[0]
        if self._header:
            header = text.rfind(self._header, floor, content)
            if header < 0:
                raise Refused("span", f"{what} has no header")
            whole = header + len(self._whole_header)
            if whole <= content and text.startswith(self._whole_header, header):
                return whole
            return header + len(self._header)
        before = _bare(self.template.render(found.given.cut(range(number)), prompt=True))
        if not text.startswith(before) or not floor <= len(before) <= content:
            raise Refused("span", f"the template renders what is before {what} in another way")
        return len(before)

    def _require_thoughts(self, given: Conversation, number: int, said: str) -> None:
        """Refuse a last answer whose thoughts the template drops; of earlier ones many do."""
        message = given.messages[number]
        if any(later["role"] == "assistant" for later in given.messages[number + 1 :]):
            return
        texts = [message[name] for name in THINKING if isinstance(message.get(name), str)]
        for leaf in leaves(message):
            inside, closed, _ = leaf.partition("</think>")
            texts += [inside.split("<think>")[-1]] if closed else []
        if any(thought.strip() not in said for thought in texts):
            raise Refused("template", "the template leaves out the thoughts of the last answer")

    def _marked(self, given: Conversation) -> Conversation:
        """Return the conversation with marks in its texts."""
        messages = []
        for number, message in enumerate(given.messages):
            made = self._broken(message)
            content = made["content"]
            if isinstance(content, str):
                made["content"] = _marked_text(content, number)
            else:
                made["content"] = [
                    part | {"text": _marked_text(part["text"], number)} for part in content
                ]
            for call in made.get("tool_calls") or ():
                function = call.get("function", call)
                function["name"] = _marked_text(function["name"], number)
            messages.append(made)
        return msgspec.structs.replace(given, messages=messages, tools=self._broken(given.tools))

    def _broken(self, value: Any) -> Any:
        """Return a value in whose texts nothing spells a special token, or begins to at the end."""
        if isinstance(value, str):
            value = self._special.sub(lambda m: m[0][:1] + SPELLED + m[0][1:], value)
            return self._begun.sub(lambda m: m[0][:1] + SPELLED + m[0][1:], value)
        if isinstance(value, Mapping):
            return {self._broken(name): self._broken(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._broken(inner) for inner in value]
        return value


class _Marks:
    """Where the marks of a conversation stand in its render.

    Attributes:
        generation: the template has `{% generation %}`.
        blocks: where those begin and stop.
        starts, stops: for each message, those of its texts.
    """

    def __init__(self, given: Conversation, generation: bool) -> None:
        self.given, self.generation = given, generation
        self.blocks: list[list[int]] = []
        self.starts: list[list[int]] = [[] for _ in given.messages]
        self.stops: list[list[int]] = [[] for _ in given.messages]


def _bare(text: str) -> str:
    """Return a render without the marks of `{% generation %}`."""
    return text.replace(BEGIN, "").replace(END, "")


def _marked_text(text: str, number: int) -> str:
    """Return a text with marks around it, inside of white space, and behind its thoughts."""
    before, core, after = _PARTED.fullmatch(text).groups()  # type: ignore[union-attr]
    if not core:
        return text
    start, stop = f"\ufdd4{number}\ufdd5", f"\ufdd6{number}\ufdd7"
    thoughts = _CLOSED.match(core)
    if thoughts:
        core = thoughts[0] + start + core[thoughts.end() :]
    return f"{before}{start}{core}{stop}{after}"


def moved(
    text: str, special: Sequence[Span], names: Mapping[str, str]
) -> tuple[str, Callable[[int], int]]:
    """Return the text with other names for special tokens, and how to find a place of the old one.

    Args:
        special: where they stand, in order.
        names: the other name of each.
    """
    parts, shifts, done, shift = [], [0], 0, 0
    for a, b in special:
        name = names[text[a:b]]
        parts += [text[done:a], name]
        shift += len(name) - (b - a)
        shifts.append(shift)
        done = b
    stops = [b for _, b in special]

    def place(old: int) -> int:
        # behind a token that stops here; never inside one
        count = bisect_left(stops, old + 1)
        return old + shifts[count]

    return "".join([*parts, text[done:]]), place
