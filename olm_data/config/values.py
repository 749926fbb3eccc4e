"""Nested plain values of a configuration, and the place that each came from.

    train.yaml --read--> Values <--override-- --a.b[0].c=value
    key path --where--> "train.yaml:12" or "--a.b[0].c"

Knows how a refusal speaks of a place; never what a field means.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from msgspec import Meta

from olm_data.config.hints import bounds, choices, describe, example_of, mapping_of, reason_of
from olm_data.config.path import KeyPath, PlainMapping, dotted, parse_path, put
from olm_data.counts import parse_count
from olm_data.errors import UsageError, nearest_of, printable, quoted, suggest
from olm_data.kinds import nearest
from olm_data.regular_files import MAX_CONFIG, read_regular

if TYPE_CHECKING:
    from olm_data.config.strict_yaml import Numbers

_MOST_PLACES = 3


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
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        example: str = "train.yaml",
        numbers: Numbers = "float",
    ) -> Values:
        """Read a YAML file.

        Args:
            path: the file; relative paths in it count from its folder.
            example: name of such a file, for the message that there is none.
            numbers: "exact": decimals are fractions.

        Raises:
            UsageError: the file is missing or is not a strict YAML mapping.
        """
        name = os.fspath(path)
        try:
            text = read_regular(name, MAX_CONFIG)
        except OSError as error:
            raise UsageError(
                f"cannot read the configuration {printable(name)}",
                where=name,
                why=error.strerror,
                fix=nearest(name, f"give the path of a {example}"),
            ) from error
        from olm_data.config import strict_yaml  # arguments in Python need no YAML

        document = strict_yaml.load(text, name, numbers=numbers)
        if not isinstance(document.value, dict):
            raise UsageError("a configuration is a mapping of names to values", where=name)
        folder = Path(name).parent
        return cls(
            document.value,
            file=name,
            folder=folder,
            lines=document.lines,
            numbers=numbers,
            imports=True,
        )

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

    def file_path(self, path: KeyPath, text: str) -> str:
        """Return the file path `text` found at `path`, absolute, or the URL as it is."""
        if "://" in text:
            return text
        given_as_option = any(path[:end] in self._options for end in range(len(path) + 1))
        base = Path.cwd() if given_as_option else self.folder
        return os.path.abspath(base / Path(text).expanduser())

    def only(self, names: Iterable[str]) -> Self:
        """Return these values without the fields of other names."""
        some = copy(self)
        some.data = {name: self.data[name] for name in names if name in self.data}
        return some

    def whole(self, value: Any) -> Any:
        """Return the integer that `1e6` or `95B` spells, anything else as it is."""
        if isinstance(value, float | Fraction) and value == value // 1:
            return int(value)
        if isinstance(value, str) and not self.digits_only:
            with contextlib.suppress(UsageError):
                return parse_count(value)
        return value

    def unknown_field(
        self, path: KeyPath, known: Iterable[str], elsewhere: Sequence[str] = ()
    ) -> UsageError:
        """Return the error that there is no field at `path`, whose siblings are `known`.

        Args:
            elsewhere: where fields of this very name stand.
        """
        siblings = list(known)
        fix, near = suggest(str(path[-1]), siblings), nearest_of(str(path[-1]), siblings)
        if elsewhere:
            meant = [*([repr(near)] if near else []), *elsewhere]
            fix = f"did you mean {' or '.join(meant[:_MOST_PLACES])}?"
        return UsageError(
            f"unknown field {printable(dotted(path))}", where=self.where(path), fix=fix
        )

    def unknown_kind(self, path: KeyPath, name: str, known: Iterable[Any]) -> UsageError:
        """Return the error that there is no component `name` to stand at `path`."""
        return UsageError(
            f"{printable(dotted(path))} has no kind called {short(name)}",
            where=self.where((*path, "name")),
            fix=suggest(name, [str(choice) for choice in known]),
        )

    def missing(self, path: KeyPath, hint: Any) -> UsageError:
        """Return the error that the field at `path` is not given."""
        if example := example_of(hint):
            fix = _written(path, example)
        else:
            fix = f"add `{path[-1]}: ...` ({describe(hint)})"
        if not self.digits_only:
            fix += f", or --{dotted(path)}=... on the command line"
        return UsageError(
            f"{printable(dotted(path))} is missing",
            where=self.where(path[:-1]),
            why=reason_of(hint),
            fix=fix,
        )

    def wrong_type(self, path: KeyPath, hint: Any, value: Any) -> UsageError:
        """Return the error that the value at `path` is none of the type `hint`."""
        fix = None
        if known := [str(choice) for choice in choices(hint)]:
            fix = suggest(str(value), known)
        elif example := example_of(hint):
            fix = _written(path, example)
        elif meant := mapping_of(hint, value):
            given = path in self._options
            fix = f"write --{dotted(path)}='{meant}'" if given else _written(path, meant)
        return UsageError(
            f"{_named(path)} is {describe(hint)}, not {short(value)}",
            where=self.where(path),
            fix=fix,
        )

    def out_of_bounds(self, path: KeyPath, hint: Any, limits: Meta, value: Any) -> UsageError:
        """Return the error that the value at `path` does not keep the `limits` of `hint`."""
        empty = limits.min_length is not None and not value
        example = example_of(hint)
        return UsageError(
            f"{_named(path)} is {'empty' if empty else f'{bounds(limits)}, not {short(value)}'}",
            where=self.where(path),
            why=reason_of(hint),
            fix=_written(path, example) if example else None,
        )


def _is_below(key: KeyPath, path: KeyPath) -> bool:
    return len(key) > len(path) and key[: len(path)] == path


def _named(path: KeyPath) -> str:
    return printable(dotted(path)) or "the file"


def _written(path: KeyPath, example: str) -> str:
    """Return an example of a field as it stands in a file; one of several lines is a block."""
    block = "\n" in example
    return f"write\n    {path[-1]}:{example}" if block else f"write `{path[-1]}: {example}`"


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


def short(value: Any) -> str:
    """Return a value as a message shows it, cut after 60 characters."""
    if isinstance(value, Fraction):
        return quoted(value)
    text = printable(repr(value) if isinstance(value, str) else str(value))
    return text if len(text) <= 60 else text[:57] + "..."
