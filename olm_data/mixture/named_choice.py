"""`KEY: NAME` of a manifest with the keys that go with the name, such as `packing` and `order`.

    order: windowed, window_chunks: 4  --read_choice--> WindowedKeys(window_chunks=4)

What a key may be, the annotations of the chosen Struct say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from olm_data.config.convert import parse
from olm_data.config.hints import fields_of, hints_of, plain
from olm_data.errors import UsageError
from olm_data.mixture.manifest_values import ManifestValues

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
    return list(dict.fromkeys(field.name for choice in choices for field in fields_of(choice)))


def read_choice(
    values: ManifestValues,
    key: str,
    name: str,
    choices: Mapping[str, type[T]],
    check: Callable[[type[T]], None] | None = None,
) -> T:
    """Return the keys that go with the choice `key: name`.

    Args:
        values: of the whole manifest.
        check: refuses a choice, by a `UsageError` without `where`, before its keys are read.

    Raises:
        UsageError: a value or combination is refused; the message has its line.
    """
    chosen, line = choices[name], values.where((key,))
    fields = {field.name: field for field in fields_of(chosen)}
    for other, keys in choices.items():
        for own in keys_of([keys]):
            if own in values.data and own not in fields:
                raise UsageError(
                    f"{own} has no meaning with {key}: {name}",
                    where=values.where((own,)),
                    fix=f"leave it out, or write {key}: {other}",
                )
    if check is not None:
        with located(line):
            check(chosen)
    given = values.only(fields)
    for own, field in fields.items():
        if field.default is None and own not in given.data:
            (note,) = plain(hints_of(chosen)[own])[1]
            raise UsageError(
                f"the key {own!r} is missing",
                where=line,
                why=note.description,
                fix=f"{own}: {note.examples[0]}",
            )
    return parse(chosen, given) if given.data else chosen()
