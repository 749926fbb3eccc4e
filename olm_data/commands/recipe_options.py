"""The fields of a recipe as options of a command: `text_column` is `--text-column`.

names -> click options (type, choices, default, help: of the field) -> `given`, those that were
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, get_origin

import click

from olm_data.config.convert import choices, fields_of, kinds_of, plain
from olm_data.config.docs import attributes
from olm_data.config.hints import ReadBy
from olm_data.tokenization.recipe import Recipe

RUN = ("workers", "runner", "slurm", "ray_address")
"""The fields that say where tasks run."""


def recipe_options(
    *names: str, helps: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add fields of `Recipe` to a command, which gets those that were set as `given`.

    Args:
        helps: help in the place of the field's own.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_given(*args: Any, **rest: Any) -> Any:
            found = {name: rest.pop(name) for name in names}
            given = {name: value for name, value in found.items() if _is_set(value)}
            if "keep" in given:
                given["keep"] = [column for column in given["keep"].split(",") if column]
            return command(*args, given=given, **rest)

        for name in reversed(names):
            with_given = _option(name, (helps or {}).get(name))(with_given)
        return with_given

    return decorate


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != ()


def _option(name: str, said: str | None) -> Callable[[Any], Any]:
    field = fields_of(Recipe)[name]
    kind, notes = plain(field.hint)
    kind, more = plain(kinds_of(kind)[0])
    usual = field.default() if field.default else None
    help = said or attributes(Recipe)[name]
    if _is_set(usual):
        help += f"  [default: {usual}]"
    number = kind is int and not any(isinstance(note, ReadBy) for note in notes + more)
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        return click.option(flag, name, is_flag=True, help=help)
    named = get_origin(kind) is Literal
    return click.option(
        flag,
        name,
        multiple=name in ("slurm", "decontaminate"),
        type=click.Choice(choices(kind)) if named else click.INT if number else None,
        help=help,
    )
