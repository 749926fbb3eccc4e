"""Values to typed configs: YAML text plus dotted overrides in, frozen dataclasses out.

    train.yaml -> strict YAML -> Values <- --a.b.c=value
                                   |
                                 parse(Config, values) -> Config          as_dict(Config) -> JSON

Generic: knows dataclasses and their annotations, nothing of training. Every mistake is a
`UsageError` that names the file and line, or the option, the expected type and the nearest name.
Never: fill in a value that the dataclass does not declare, or pass over one that it does not know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from olm_data import strict_yaml
from olm_data.counts import parse_count
from olm_data.errors import OlmError, UsageError, printable, suggest
from olm_data.regular_files import MAX_CONFIG, read_regular
from olm_train.config_path import KeyPath, dotted, parse_path, put

FilePath = NewType("FilePath", str)
"""A local path or URL. Relative ones in a file count from that file's folder."""

Config = TypeVar("Config")


class Values:
    """Plain nested values and where each came from.

    Args:
        data: nested dicts, lists and scalars.
        file: the name shown in messages for a value of the file.
        folder: what relative paths in `data` count from.
        lines: line number by key path, of values that came from a file.
    """

    def __init__(
        self,
        data: dict[str, Any],
        *,
        file: str = "config",
        folder: str | os.PathLike[str] = ".",
        lines: Mapping[KeyPath, int] | None = None,
    ) -> None:
        self.data, self.file, self.folder = data, file, Path(folder)
        self._lines = dict(lines or {})
        self._options: dict[KeyPath, str] = {}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Values:
        """Read a YAML file.

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
                fix="give the path of a train.yaml",
            ) from error
        document = strict_yaml.load(text, name, numbers="float")
        if not isinstance(document.value, dict):
            raise UsageError("a configuration is a mapping of names to values", where=name)
        return cls(document.value, file=name, folder=Path(name).parent, lines=document.lines)

    def override(self, option: str) -> None:
        """Apply one `--a.b[0].c=value`; the value is YAML, a mapping replaces what stood there.

        Raises:
            UsageError: the option has no name or no value, or its path leads nowhere.
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
        put(self.data, path, strict_yaml.parse_value(text, where=shown), where=shown)
        for origins in (self._lines, self._options):
            for replaced in [key for key in origins if key[: len(path)] == path]:
                del origins[replaced]
        self._options[path] = shown

    def where(self, path: KeyPath) -> str:
        """Return where the value at `path` came from: `train.yaml:12` or the option."""
        for end in range(len(path), -1, -1):
            if path[:end] in self._options:
                return self._options[path[:end]]
            if path[:end] in self._lines:
                return f"{self.file}:{self._lines[path[:end]]}"
        return self.file

    def file_path(self, path: KeyPath, text: str) -> str:
        """Return the file path `text` found at `path`, absolute, or the URL as it is."""
        if "://" in text:
            return text
        given_as_option = any(path[:end] in self._options for end in range(len(path) + 1))
        base = Path.cwd() if given_as_option else self.folder
        return os.path.abspath(base / Path(text).expanduser())


def parse(config: type[Config], values: Values, path: KeyPath = ()) -> Config:
    """Return the dataclass `config` made of the values at `path`.

    Raises:
        UsageError: unknown or missing field, wrong type, or a value the dataclass refuses.
    """
    found: Any = values.data
    for part in path:
        found = found[part]
    parsed: Config = _convert(config, found, values, path)
    return parsed


def as_dict(config: Any) -> Any:
    """Return a config as JSON values: dataclasses to dicts, tuples to lists, enums to values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: as_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Enum):
        return config.value
    if isinstance(config, Mapping):
        return {str(key): as_dict(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [as_dict(value) for value in config]
    return config


def differences(old: Any, new: Any, path: KeyPath = ()) -> list[str]:
    """Return one line for each place where two plain values differ, `a.b: 1 -> 2`."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in [*old, *(key for key in new if key not in old)]:
            lines += differences(old.get(key), new.get(key), (*path, key))
        return lines
    return [] if old == new else [f"{dotted(path)}: {_short(old)} -> {_short(new)}"]


def _split(option: str) -> tuple[str, str, str]:
    """Return name, "=" and value; a quoted key of the name may hold an equals sign."""
    end = 0
    while (equals := option.find("=", end)) >= 0:
        name = option[:equals]
        if name.count('["') == name.count('"]') and name.count("['") == name.count("']"):
            return name.removeprefix("--"), "=", option[equals + 1 :]
        end = equals + 1
    return option.removeprefix("--"), "", ""


def _convert(kind: Any, value: Any, values: Values, path: KeyPath) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(kind), value, values, path)
    if kind is FilePath and isinstance(value, str):
        return values.file_path(path, value)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, values, path)
    if origin in (list, tuple) and isinstance(value, list):
        return _convert_sequence(origin, get_args(kind), value, values, path)
    if origin in (dict, Mapping) and isinstance(value, dict):
        inner = get_args(kind)[1]
        return {key: _convert(inner, item, values, (*path, key)) for key, item in value.items()}
    if origin is Literal and value in get_args(kind):
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        if value in [member.value for member in kind]:
            return kind(value)
    elif kind is float:
        number = _as_float(value)
        if number is not None:
            return number
    elif kind is int:
        if isinstance(value, float) and value.is_integer():  # 1e6
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str):  # 95B
            with contextlib.suppress(UsageError):
                return parse_count(value)
    elif kind is Any or (isinstance(kind, type) and type(value) is kind):
        return value
    raise _wrong_type(kind, value, values, path)


def _convert_union(kinds: tuple[Any, ...], value: Any, values: Values, path: KeyPath) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        return _convert(kinds[0], value, values, path)
    named = {_name_of(kind): kind for kind in kinds if dataclasses.is_dataclass(kind)}
    if isinstance(value, dict) and named:
        name = value.get("name", next(iter(named)))
        if not isinstance(name, str):
            raise _wrong_type(Literal[tuple(named)], name, values, (*path, "name"))
        if name not in named:
            raise unknown_kind(name, named, values, path)
        return _convert(named[name], value, values, path)
    for kind in kinds:
        try:
            return _convert(kind, value, values, path)
        except UsageError:
            continue
    raise _wrong_type(Union[kinds], value, values, path)  # noqa: UP007  # built at run time


def _convert_sequence(
    origin: Any, kinds: tuple[Any, ...], value: list[Any], values: Values, path: KeyPath
) -> Any:
    if origin is tuple and kinds[-1] is not Ellipsis:
        if len(value) != len(kinds):
            raise UsageError(
                f"{dotted(path)} has {len(kinds)} values, not {len(value)}",
                where=values.where(path),
            )
        return tuple(
            _convert(kind, item, values, (*path, n))
            for n, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    return origin(_convert(kinds[0], item, values, (*path, n)) for n, item in enumerate(value))


def _convert_dataclass(kind: Any, value: Any, values: Values, path: KeyPath) -> Any:
    if value is None:
        value = {}  # `speed_monitor:` with nothing after it
    if not isinstance(value, dict):
        raise _wrong_type(kind, value, values, path)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name in value:
        if name not in fields:
            raise unknown_field(name, fields, values, path)
    hints = get_type_hints(kind)
    parsed = {
        name: _convert(hints[name], item, values, (*path, name)) for name, item in value.items()
    }
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING
        if name not in parsed and no_default and field.default_factory is dataclasses.MISSING:
            raise UsageError(
                f"{dotted((*path, name))} is missing",
                where=values.where(path),
                fix=f"add `{name}: ...` ({_describe(hints[name])}), "
                f"or --{dotted((*path, name))}=... on the command line",
            )
    try:
        return kind(**parsed)
    except OlmError as error:
        place = tuple((error.where or "").split("."))
        deeper = place if place[: len(path)] == path else path
        raise UsageError(
            error.what, where=values.where(deeper), why=error.why, fix=error.fix
        ) from error


def unknown_field(name: Any, known: Iterable[str], values: Values, path: KeyPath) -> UsageError:
    """Return the error that the section at `path` has no field `name`."""
    return UsageError(
        f"unknown field {printable(dotted((*path, name)))}",
        where=values.where((*path, name)),
        fix=suggest(str(name), known),
    )


def unknown_kind(name: str, known: Iterable[Any], values: Values, path: KeyPath) -> UsageError:
    """Return the error that there is no component `name` to stand at `path`."""
    return UsageError(
        f"{dotted(path)} has no kind called {_short(name)}",
        where=values.where((*path, "name")),
        fix=suggest(name, [str(choice) for choice in known]),
    )


def _name_of(kind: Any) -> Any:
    return next((f.default for f in dataclasses.fields(kind) if f.name == "name"), None)


def _as_float(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def _wrong_type(kind: Any, value: Any, values: Values, path: KeyPath) -> UsageError:
    return UsageError(
        f"{dotted(path)} is {_describe(kind)}, not {_short(value)}",
        where=values.where(path),
        fix=suggest(str(value), [str(choice) for choice in _choices(kind)])
        if _choices(kind)
        else None,
    )


def _choices(kind: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.value for member in kind]
    if get_origin(kind) in (Union, types.UnionType):
        return [choice for inner in get_args(kind) for choice in _choices(inner)]
    return []


def _describe(kind: Any) -> str:
    simple = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    if kind in simple:
        return simple[kind]
    if kind is FilePath:
        return "a path"
    if kind is type(None):
        return "null"
    choices = _choices(kind)
    if choices and get_origin(kind) not in (Union, types.UnionType):
        return "one of " + ", ".join(str(choice) for choice in choices)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(inner) for inner in get_args(kind))
    if origin in (list, tuple):
        return f"a list ({_describe(get_args(kind)[0])} each)"
    if origin in (dict, Mapping):
        return f"a mapping of names ({_describe(get_args(kind)[1])} each)"
    if dataclasses.is_dataclass(kind):
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        return f"a mapping with {names}"
    return getattr(kind, "__name__", str(kind))


def _short(value: Any) -> str:
    text = printable(repr(value) if isinstance(value, str) else str(value))
    return text if len(text) <= 60 else text[:57] + "..."
