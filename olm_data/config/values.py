"""Nested plain values of a configuration, and the place that each came from.

train.yaml --read--> Values <--override-- --a.b[0].c=value
key path --where--> "train.yaml:12" or "--a.b[0].c"
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from olm_data.errors import UsageError, ValidationError, printable, quoted, suggest
from olm_data.path_kinds import nearest
from olm_data.regular_files import MAX_CONFIG, read_regular

if TYPE_CHECKING:
    from olm_data.config.strict_yaml import Numbers


class Values:
    """Plain nested values and where each came from.

    Args:
        data: nested dicts, lists and scalars.
        file: the name shown in messages for a value of the file.
        folder: what relative paths in `data` count from.
        lines: line number by key path, of values that came from a file.
        numbers: how decimals of overrides are read, as those of `data` were.
        digits_only: an integer is not spelt `95B`, null stands for nothing, and no option replaces
            a value: the file is the only place where they are.
        imports: classes may be imported that it names by their paths. Only where the user wrote
            the names: never for what came with a checkpoint, a model or a dataset.
    """

    def __init__(
        self,
        data: PlainMapping,
        *,
        file: str = "config",
        folder: str | os.PathLike[str] = ".",
        lines: Mapping[KeyPath, int] | None = None,
        numbers: Numbers = "float",
        digits_only: bool = False,
        imports: bool = False,
    ) -> None:
        self.data, self.file, self.folder = data, file, Path(folder)
        self.numbers, self.digits_only = numbers, digits_only
        self.imports = imports
        self._lines = dict(lines or {})
        self._options: dict[KeyPath, str] = {}

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, example: str = "train.yaml", **how: Any) -> Self:
        """Read a YAML file that the user wrote; relative paths in it count from its folder.

        Args:
            example: name of such a file, for the message that there is none.
            how: as `parse` takes it.

        Raises:
            UsageError: the file cannot be read or is not a strict YAML mapping.
        """
        name = os.fspath(path)
        try:
            text = read_regular(name, MAX_CONFIG)
        except (OSError, ValidationError) as error:
            raise UsageError(
                f"cannot read the configuration {printable(name)}",
                where=name,
                why=error.strerror if isinstance(error, OSError) else error.what,
                fix=nearest(name, f"give the path of a {example}"),
            ) from error
        return cls.parse(text, name, folder=Path(name).parent, imports=True, **how)

    @classmethod
    def parse(cls, text: str | bytes, file: str, *, numbers: Numbers = "float", **how: Any) -> Self:
        """Return the values of a YAML text.

        Args:
            file: its name, for messages.
            numbers: "exact": decimals are fractions.
            how: as the class takes it.

        Raises:
            UsageError: it is not a strict YAML mapping.
        """
        from olm_data.config import strict_yaml  # arguments in Python need no YAML

        found = strict_yaml.load(text, file, numbers=numbers)
        if not isinstance(found.value, dict):
            raise UsageError("a configuration is a mapping of names to values", where=file)
        return cls(found.value, file=file, lines=found.lines, numbers=numbers, **how)

    def override(self, option: str) -> None:
        """Apply one `--a.b[0].c=value`; the value is YAML, a mapping replaces what stood there.

        Raises:
            UsageError: the option has no name or no value, its path leads nowhere, or it replaces
                what an option before it gives a part of.
        """
        name, equals, text = _split(option)
        path = parse_path(name)
        if not option.startswith("--") or not equals or path is None:
            raise UsageError(
                f"cannot read the option {printable(option)}",
                fix="write --name.of.field=value, --name.of.list[0]=value or "
                """--name.of.mapping["key"]=value""",
            )
        shown = f"--{name}"
        lost = [given for key, given in self._options.items() if _is_below(key, path)]
        if lost:
            raise UsageError(
                f"{shown} replaces what {lost[0]} gives",
                where=shown,
                fix=f"give {shown} before it, or leave one of them out",
            )
        from olm_data.config import strict_yaml

        self.give(path, strict_yaml.parse_value(text, where=shown, numbers=self.numbers), shown)

    def give(self, path: KeyPath, value: Any, shown: str) -> None:
        """Put a value in the place of what stood there; messages call it `shown`.

        Raises:
            UsageError: the path leads nowhere.
        """
        put(self.data, path, value, where=shown)
        for origins in (self._lines, self._options):
            for replaced in [key for key in origins if key[: len(path)] == path]:
                del origins[replaced]
        self._options[path] = shown

    def override_all(self, words: Iterable[str], *, known: Iterable[str] = ()) -> None:
        """Apply the words of a command line: `--a.b=value`, or `--a.b value` as two words.

        Args:
            words: what is left of the arguments once the command took its own.
            known: the command's own options, to be named where one is misspelt.

        Raises:
            UsageError: see `override`; or an option is misspelt or has no value.
        """
        rest = iter(words)
        for word in rest:
            self.override(word if "=" in word else with_value(word, rest, known))

    def where(self, path: KeyPath) -> str:
        """Return where the value at `path` came from: `train.yaml:12` or the option."""
        for end in range(len(path), -1, -1):
            if path[:end] in self._options:
                return self._options[path[:end]]
            if path[:end] in self._lines:
                return f"{self.file}:{self._lines[path[:end]]}"
            for option, shown in self._options.items():
                if path and option[:end] == path:  # one that made the mapping there
                    return shown
        return self.file

    def is_option(self, path: KeyPath) -> bool:
        """Whether an option gave the value at `path`, and no file."""
        return any(path[:end] in self._options for end in range(len(path) + 1))

    def file_path(self, path: KeyPath, text: str) -> str:
        """Return the file path `text` found at `path`, absolute, or the URL as it is."""
        if "://" in text:
            return text
        base = Path.cwd() if self.is_option(path) else self.folder
        return os.path.abspath(base / Path(text).expanduser())


def _is_below(key: KeyPath, path: KeyPath) -> bool:
    return len(key) > len(path) and key[: len(path)] == path


def with_value(name: str, rest: Iterator[str], known: Iterable[str] = ()) -> str:
    """Return `--name=value` of the option `--name value`, whose value is the next of `rest`.

    Raises:
        UsageError: `--name` can be no field, or nothing follows that could be its value.
    """
    value = next(rest, "")
    near = suggest(name, known) if known else ""
    if not name.startswith("--") or ("." not in name and near.startswith("did you mean")):
        raise UsageError(f"unknown option {printable(name)}", fix=near or None)
    if not value or value.startswith("--"):
        raise UsageError(
            f"{printable(name)} has no value",
            fix=f"{near} A field is set with {name}=value".strip(),
        )
    return f"{name}={value}"


def _split(option: str) -> tuple[str, str, str]:
    """Return name, "=" and value; a quoted key of the name may hold an equals sign."""
    end = 0
    while (equals := option.find("=", end)) >= 0:
        name = option[:equals]
        if name.count('["') == name.count('"]') and name.count("['") == name.count("']"):
            return name.removeprefix("--"), "=", option[equals + 1 :]
        end = equals + 1
    return option.removeprefix("--"), "", ""


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


def short(value: Any) -> str:
    """Return a value as a message shows it, cut after 60 characters."""
    if isinstance(value, Fraction):
        return quoted(value)
    text = printable(repr(value) if isinstance(value, str) else str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def differences(old: Any, new: Any, path: KeyPath = ()) -> list[str]:
    """Return one line for each place where two plain values differ, `a.b: 1 -> 2`."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in [*old, *(key for key in new if key not in old)]:
            lines += differences(old.get(key), new.get(key), (*path, key))
        return lines
    return [] if old == new else [f"{dotted(path)}: {short(old)} -> {short(new)}"]


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
