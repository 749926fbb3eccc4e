"""Values of a mixture manifest: exact numbers, and how a refusal speaks of them.

    manifest.yaml --strict_yaml--> Document --of--> ManifestValues --config.convert.parse--> keys

Numbers are integers and fractions, never text; null stands for nothing. Never: know what a key
means (manifest.py, stage_spec.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated, Any, get_origin

from msgspec import Meta

from olm_data.config.convert import parse
from olm_data.config.hints import Reader, choices, plain
from olm_data.config.path import KeyPath
from olm_data.config.strict_yaml import Document
from olm_data.config.values import Values
from olm_data.errors import UsageError, printable, quoted, suggest

MAX_SEQUENCE_LENGTH = 1 << 24

SequenceLength = Annotated[int, Meta(ge=1, le=MAX_SEQUENCE_LENGTH)]
Weights = Annotated[dict[str, Fraction], Meta(min_length=1)]
"""A number for each source or group."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def name_of(kind: str) -> Reader:
    """Return the annotation of the name of a source, stage or group (`kind`)."""

    def read(name: Any) -> str:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"{quoted(name)} is not a {kind} name",
                fix="use up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first",
            )
        return name

    return Reader(read, f"a {kind} name", {"type": "string", "pattern": f"^{_NAME.pattern}$"})


class ManifestValues(Values):
    """See `Values`; the file is a mixture, of ours or another project."""

    numbers = "exact"
    nulls = False

    @classmethod
    def of(cls, document: Document, folder: str = ".") -> ManifestValues:
        """Return the values of a parsed file."""
        return cls(document.value, file=document.path, folder=folder, lines=document.lines)

    def whole(self, value: Any) -> Any:
        """Return the integer that a fraction is, anything else as it is."""
        return int(value) if isinstance(value, Fraction) and value.denominator == 1 else value

    def section(self, path: KeyPath, hint: Any, value: Any) -> dict[str, Any]:
        """Return the mapping at `path`; an empty one is refused."""
        if not isinstance(value, dict) or not value:
            raise self.wrong_type(path, hint, value)
        return value

    def unknown_field(self, path: KeyPath, known: Iterable[str]) -> UsageError:
        """Return the error that there is no key at `path`."""
        key = str(path[-1])
        return UsageError(
            f"unknown key {printable(key)!r}", where=self.where(path), fix=suggest(key, known)
        )

    def missing(self, path: KeyPath, hint: Any) -> UsageError:
        """Return the error that a key is not given; the hint may have an example of it."""
        example = [n.examples[0] for n in plain(hint)[1] if isinstance(n, Meta) and n.examples]
        return UsageError(
            f"the key {path[-1]!r} is missing",
            where=self.where(path[:-1]),
            fix=f"add\n    {path[-1]}:{example[0]}" if example else f"add `{path[-1]}:`",
        )

    def wrong_type(self, path: KeyPath, hint: Any, value: Any) -> UsageError:
        """Return the error that the value at `path` is not what the hint asks for."""
        name = printable(str(path[-1])) if path else "the manifest"
        kind, notes = plain(hint)
        what, fix = f"{name} must be a mapping with at least one `key: value`", None
        if known := choices(hint):
            what = f"{name} cannot be {quoted(value)}"
            fix = f"this version accepts: {', '.join(known)}"
        elif kind in (int, Fraction) and (
            isinstance(value, bool) or not isinstance(value, (int, Fraction))
        ):
            what = f"{quoted(value)} is not a number"
            fix = "write a number without quotes, such as 15 or 0.25"
        elif kind in (int, Fraction):
            limits = (
                words for note in notes if isinstance(note, Meta) and (words := _bounds(note))
            )
            what = f"{name} must be {next(limits)}"
        elif get_origin(kind) is list:
            what = f"{name} must be a list with at least one {name.removesuffix('s')}"
            fix = "".join(f"write\n    {name}:{n.examples[0]}" for n in notes if n.examples)
        else:
            fix = "see docs/reference/mixture.md for an example"
        return UsageError(what, where=self.where(path), fix=fix)

    def out_of_bounds(self, path: KeyPath, hint: Any, limits: Meta, value: Any) -> UsageError:
        """Return the error that the value at `path` does not keep its limits."""
        return self.wrong_type(path, hint, value)


def weights_of(values: Values, path: KeyPath = ()) -> dict[str, Fraction]:
    """Return the numbers by name at `path`."""
    found: dict[str, Fraction] = parse(Weights, values, path)
    return found


def _bounds(limits: Meta) -> str:
    if limits.gt == 0:
        return "more than 0"
    if limits.ge is None or limits.le is None:
        return ""
    same = limits.ge == limits.le
    return f"{limits.ge}" if same else f"a whole number from {limits.ge:,} to {limits.le:,}"
