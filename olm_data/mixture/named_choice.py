"""`KEY: NAME` of a manifest with the keys that go with the name, such as `packing` and `order`.

    order: windowed, window_chunks: 4  --read_choice--> WindowedKeys(window_chunks=4)

What a key may be, the annotations of the chosen Struct say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from olm_data.config.strict_yaml import Document
from olm_data.counts import MAX_COUNT, parse_count
from olm_data.errors import UsageError
from olm_data.mixture.manifest_values import choice_at, integer_at

T = TypeVar("T", bound=msgspec.Struct)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say of a `UsageError` raised inside where it is wrong, if it does not say so itself."""
    try:
        yield
    except UsageError as error:
        error.where = error.where or where
        raise


def keys_of(choices: Iterable[type[msgspec.Struct]]) -> list[str]:
    """Return the keys that go with any of the choices."""
    return list(dict.fromkeys(key for choice in choices for key in choice.__struct_fields__))


def read_choice(
    document: Document,
    key: str,
    choices: Mapping[str, type[T]],
    check: Callable[[type[T]], None] | None = None,
) -> T:
    """Return what stands under `key` and the keys that go with it; the first choice is the default.

    Args:
        check: refuses a choice, by a `UsageError` without `where`, before its keys are read.

    Raises:
        UsageError: a value or combination is refused; the message has its line.
    """
    name = choice_at(document, key, tuple(choices))
    chosen = choices[name]
    for other, keys in choices.items():
        for own in keys.__struct_fields__:
            if own in document.value and own not in chosen.__struct_fields__:
                raise UsageError(
                    f"{own} has no meaning with {key}: {name}",
                    where=document.where(own),
                    fix=f"leave it out, or write {key}: {other}",
                )
    if check is not None:
        with located(document.where(key)):
            check(chosen)
    return chosen(**_values(document, key, chosen))


def _values(document: Document, choice: str, chosen: type[msgspec.Struct]) -> dict[str, Any]:
    values = {}
    fields = msgspec.inspect.type_info(chosen)
    assert isinstance(fields, msgspec.inspect.StructType)
    for field in fields.fields:
        key = field.name
        kind: Any = field.type
        notes: dict[str, Any] = {}
        if isinstance(kind, msgspec.inspect.UnionType):
            (kind,) = (one for one in kind.types if not isinstance(one, msgspec.inspect.NoneType))
        if isinstance(kind, msgspec.inspect.Metadata):
            kind, notes = kind.type, {**(kind.extra_json_schema or {}), **(kind.extra or {})}
        if key not in document.value:
            if field.required:
                raise UsageError(
                    f"the key {key!r} is missing",
                    where=document.where(choice),
                    why=notes.get("description"),
                    fix=f"{key}: {notes['examples'][0]}",
                )
        elif notes.get("written") == "count":
            values[key] = parse_count(document.value[key], document.where(key))
        else:
            low, high = kind.ge or 0, MAX_COUNT if kind.le is None else kind.le
            values[key] = integer_at(document, (key,), low, high)
    return values
