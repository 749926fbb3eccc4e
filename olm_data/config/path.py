"""Names of places in a configuration, as options and messages spell them.

    a.b[2].c          a field of a mapping in a list       ("a", "b", 2, "c")
    a.b["x.y"].c      a key that is no plain word          ("a", "b", "x.y", "c")

Pure: text to key paths and back, and putting a value at a place of nested plain values.
"""

from __future__ import annotations

import re
from typing import Any

from olm_data.errors import UsageError, printable

KeyPath = tuple[str | int, ...]
PlainMapping = dict[str, Any]
"""Nested plain values, as a file has them before anything is known of their types."""

_PART = re.compile(r"""(?:^|\.)([^.\[\]"']+)|\[(\d+)\]|\[(?:"([^"]*)"|'([^']*)')\]""")
_PLAIN = re.compile(r"""[^.\[\]"']+""")


def dotted(path: KeyPath) -> str:
    """Return `a.b[2].c` for a key path; `parse_path` reads it back."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN.fullmatch(part):
            text += f".{part}"
        else:
            quote = "'" if '"' in part else '"'
            text += f"[{quote}{part}{quote}]"
    return text.removeprefix(".")


def parse_path(text: str) -> KeyPath | None:
    """Return the key path that `text` spells, None if it spells none."""
    path: list[str | int] = []
    end = 0
    while end < len(text):
        match = _PART.match(text, end)
        if match is None or (match[1] and bool(end) != (text[end] == ".")):
            return None
        word, index, *quoted = match.groups()
        path.append(
            int(index) if index is not None else next(w for w in (word, *quoted) if w is not None)
        )
        end = match.end()
    return tuple(path) if path and isinstance(path[0], str) else None


def put(data: PlainMapping, path: KeyPath, value: Any, *, where: str) -> None:
    """Put `value` at `path` of `data`, in place; missing mappings on the way are made.

    A text on the way is the name of a component, `{name: text}`.

    A list has to be there already; the place just behind its end adds an item.

    Raises:
        UsageError: a part of the path names a field of a plain value, or no item of its list.
    """
    place: Any = data
    for depth, part in enumerate(path[:-1]):
        here = path[: depth + 1]
        _check(place, part, here, where)
        below = place.get(part) if isinstance(part, str) else _item(place, part, here, where)
        if isinstance(below, str | None) and isinstance(path[depth + 1], str):
            below = {} if below is None else {"name": below}
            place[part] = below
        place = below
    last = path[-1]
    _check(place, last, path, where)
    if isinstance(last, int) and last == len(place):
        place.append(value)
    else:
        if isinstance(last, int):
            _item(place, last, path, where)
        place[last] = value


def _check(place: Any, part: str | int, path: KeyPath, where: str) -> None:
    if isinstance(part, str) and not isinstance(place, dict):
        kind = "a list, its items are [0], [1], ..." if isinstance(place, list) else "a value"
        raise UsageError(
            f"{printable(dotted(path[:-1]))} is {kind}"
            + ("" if isinstance(place, list) else ", it has no fields"),
            where=where,
        )
    if isinstance(part, int) and not isinstance(place, list):
        name = printable(dotted(path[:-1]))
        raise UsageError(
            f"{name} is not a list in the file",
            where=where,
            fix=f"give all of it: --{name}='[...]'",
        )


def _item(place: list[Any], index: int, path: KeyPath, where: str) -> Any:
    if index >= len(place):
        raise UsageError(
            f"{printable(dotted(path[:-1]))} has {len(place)} items, there is no [{index}]",
            where=where,
            fix=f"[{len(place)}] adds one",
        )
    return place[index]
