"""YAML for configuration, read strictly: a spelling has one meaning, or is an error with its line.

    text --(events of the YAML parser)--> checks --> Document(value, line of each key path)

The parser's events are checked as they arrive, so that a hostile file is refused before anything is
built from it. Refused, each with `path:line`: anchors, aliases, merge keys, tags, duplicate keys,
keys that are no plain text, several documents, NaN and infinity, numbers with leading zeros,
integers beyond 64 bits, more than 1 MB, more than 20 levels.

Never done here: no objects are made by tags, no environment is read, and no number goes through a
binary float unless the caller asks for floats. Unlike YAML 1.1, `3e-4` is a number; `yes`, `on`,
`1:30` and `2026-01-01` are plain text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml

from olm_data.errors import UsageError, printable

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_INTEGER = (1 << 63) - 1
MAX_EXPONENT = 400

Numbers = Literal["exact", "float"]
KeyPath = tuple[str | int, ...]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_DECIMAL = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(?:nan|inf|infinity)", re.IGNORECASE)
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(frozen=True)
class YamlDocument:
    """A parsed file: its plain Python value and the line of each key.

    Attributes:
        value: None, bool, int, Fraction (or float), str, list or dict with str keys.
        lines: 1-based line of each key path, such as `("stages", 0, "tokens")`.
    """

    value: Any
    lines: Mapping[KeyPath, int]


def load(text: str | bytes, path: str | Path, *, numbers: Numbers = "exact") -> YamlDocument:
    """Parse one YAML document.

    Args:
        text: the file's content; bytes are UTF-8.
        path: its name, for messages only.
        numbers: "exact" gives `Fraction` for decimals (1.10 is 11/10), "float" gives `float`;
            integers are `int` either way.

    Raises:
        UsageError: the text is refused; the message has the line.
    """
    name = str(path)
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"the file has {len(raw):,} bytes; a configuration has at most {MAX_BYTES:,}",
            where=name,
            fix="check that this is the file you meant",
        )
    try:
        decoded = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            "the file is not UTF-8 text", where=f"{name}:{line}", fix="save it as UTF-8"
        ) from None
    return _Builder(decoded, name, numbers).document()


def parse_value(text: str, *, where: str = "command line", numbers: Numbers = "float") -> Any:
    """Return the value of a command-line override such as `3e-4`, `true`, `[1, 2]` or `s3://b/x`.

    Text that opens with a bracket, a brace or a quote is YAML; anything else is one plain scalar
    as it stands, so no character needs quoting.

    Raises:
        UsageError: the text is refused, for the reasons `load` gives.
    """
    text = text.strip()
    if text[:1] in ("[", "{", '"', "'"):
        return load(text, where, numbers=numbers).value
    return scalar(text, where, numbers)


def scalar(text: str, where: str, numbers: Numbers) -> Any:
    """Return the value of a plain scalar: None, bool, int, Fraction or float, else the text itself.

    Raises:
        UsageError: a number that has no single finite 64-bit meaning.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        raise UsageError(
            f"{printable(text)!r} is not a finite number",
            where=where,
            fix="write a number, or put quotes around it if it is a word",
        )
    if _INTEGER.fullmatch(text):
        return _integer(text, where)
    if _DECIMAL.fullmatch(text):
        return _decimal(text, where, numbers)
    return text


def _integer(text: str, where: str) -> int:
    digits = text.lstrip("+-").replace("_", "")
    if len(digits) > 1 and digits[0] == "0":
        raise UsageError(
            f"the number {printable(text[:40])} has a leading zero",
            where=where,
            why="some YAML readers take it as octal",
            fix="drop the zero, or put quotes around it if it is a word",
        )
    value = int(digits) if len(digits) <= 19 else MAX_INTEGER + 1
    if value > MAX_INTEGER:
        raise UsageError(f"the number {_short(text)} is larger than 2^63 - 1", where=where)
    return -value if text[0] == "-" else value


def _decimal(text: str, where: str, numbers: Numbers) -> Fraction | float:
    text = text.replace("_", "")
    mantissa, _, exponent = text.lower().partition("e")
    digits = exponent.lstrip("+-").lstrip("0")
    if len(mantissa) > MAX_EXPONENT or len(digits) > 3 or int(digits or 0) > MAX_EXPONENT:
        raise UsageError(f"the number {_short(text)} is out of range", where=where)
    if numbers == "exact":
        return Fraction(text)
    value = float(text)
    if math.isinf(value):
        raise UsageError(f"the number {_short(text)} is out of range", where=where)
    return value


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text):,} characters)"


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None  # both parsers mark every event
    return event.start_mark.line + 1


class _Builder:
    """Turns parser events into values, checking each before it is used."""

    def __init__(self, text: str, path: str, numbers: Numbers) -> None:
        self.path, self.numbers = path, numbers
        self.lines: dict[KeyPath, int] = {}
        self.events = self._checked(text)

    def document(self) -> YamlDocument:
        value = self._node(next(self.events), ())
        for _ in self.events:
            pass  # the rest is checked too: nothing may follow the one document
        return YamlDocument(value, self.lines)

    def _where(self, event: yaml.Event) -> str:
        return f"{self.path}:{_line(event)}"

    def _checked(self, text: str) -> Iterator[yaml.Event]:
        """Yield the events inside the document; refuse what must not be there, as it comes."""
        depth = documents = 0
        try:
            for event in yaml.parse(text, Loader=_LOADER):
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        raise UsageError(
                            "a second document starts here",
                            where=self._where(event),
                            fix="keep one document; remove the `---` line",
                        )
                    if event.tags:
                        raise self._refused(event, "a %TAG directive")
                    continue
                if isinstance(event, yaml.CollectionStartEvent):
                    depth += 1
                    if depth > MAX_DEPTH:
                        raise UsageError(
                            f"more than {MAX_DEPTH} levels of nesting", where=self._where(event)
                        )
                elif isinstance(event, yaml.CollectionEndEvent):
                    depth -= 1
                if isinstance(event, yaml.AliasEvent):
                    raise self._refused(event, f"the alias *{event.anchor}")
                if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
                    raise self._refused(event, f"the anchor &{event.anchor}")
                if (tag := getattr(event, "tag", None)) is not None:
                    raise self._refused(event, f"the tag {tag}")
                if isinstance(event, (yaml.NodeEvent, yaml.CollectionEndEvent)):
                    yield event
        except (yaml.YAMLError, UnicodeError) as error:
            raise self._syntax(error, text) from None
        if not documents:
            raise UsageError("the file is empty", where=self.path)

    def _refused(self, event: yaml.Event, what: str) -> UsageError:
        return UsageError(
            f"{printable(what)} is not allowed here",
            where=self._where(event),
            why="anchors, aliases, merge keys and tags make one file mean several things",
            fix="write the value out in full",
        )

    def _syntax(self, error: Exception, text: str) -> UsageError:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        position = getattr(error, "position", None)
        if mark is not None:
            line = mark.line + 1
        elif isinstance(position, int):
            line = text.count("\n", 0, position) + 1
        else:
            line = 1
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        return UsageError(f"not valid YAML: {printable(reason)}", where=f"{self.path}:{line}")

    def _node(self, event: yaml.Event, keys: KeyPath) -> Any:
        self.lines.setdefault(keys, _line(event))
        if isinstance(event, yaml.ScalarEvent):
            plain = event.implicit[0]
            return scalar(event.value, self._where(event), self.numbers) if plain else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(keys)
        return self._mapping(keys)

    def _sequence(self, keys: KeyPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*keys, len(items))))
        return items

    def _mapping(self, keys: KeyPath) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise UsageError("a key must be plain text", where=self._where(event))
            key = event.value
            if key == "<<" and event.implicit[0]:
                raise self._refused(event, "the merge key <<")
            if key in items:
                raise UsageError(
                    f"the key {printable(key)!r} appears here twice",
                    where=self._where(event),
                    why=f"its first value is in line {self.lines[(*keys, key)]}; one would be lost",
                    fix="remove one of the two",
                )
            self.lines[(*keys, key)] = _line(event)
            items[key] = self._node(next(self.events), (*keys, key))
        return items
