"""What is said of the fields of a configuration: for reference pages, schemas and help."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, get_args

from olm_data.config.convert import fields_of, parts_of, plain
from olm_data.config.hints import Needs
from olm_data.plugins import load, ours

_TITLE = re.compile(r"[A-Z]\w+:$")


def summary_of(kind: type) -> str:
    """Return the first sentence of a class's docstring."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split()).removesuffix(".")


@functools.cache
def attributes(config: Any) -> dict[str, str]:
    """Return what docstrings, of bases too, and annotations say of fields, on one line each."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        _, _, section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition(
            "\nAttributes:\n"
        )
        names: list[str] = []
        for line in section.splitlines():
            head = re.fullmatch(r" {4}((?:\w+, )*\w+): (.*)", line)
            if _TITLE.match(line):
                break
            if head is not None:
                names = head[1].split(", ")
                found.update(dict.fromkeys(names, head[2]))
            elif line.strip():
                found.update({name: f"{found[name]} {line.strip()}" for name in names})
    for name, field in fields_of(config).items():
        for note in plain(field.hint)[1]:
            if isinstance(note, Needs) and name in found:
                needs = "needs" if note.unless is None else "not with"
                other = f"`{note}`".replace(" or ", "` or `")
                found[name] = f"{found[name].removesuffix('.')}; {needs} {other}."
    return found


def parts_by_name(hint: Any) -> dict[str, Any]:
    """Return the classes that this distribution brings for extra fields, by name."""
    parts = parts_of(get_args(plain(hint)[0])[1])
    return {} if parts is None else {n: load(parts.group, n) for n in ours(parts.group)}
