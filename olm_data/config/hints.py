"""What may annotate a field of a configuration beside msgspec's `Meta`.

    Annotated[FilePath, Reader(...), OneOf(...), Needs(...), Parts(...), ExtraFields()]

Values only; `convert` acts by them. Also: the words of a `Meta`, for messages and pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NewType

from msgspec import Meta

from olm_data.counts import parse_count

FilePath = NewType("FilePath", str)
"""A local path or URL. Relative ones in a file count from that file's folder."""

Schema = dict[str, Any]
"""A JSON Schema."""

LocalPath = Annotated[FilePath, Meta(pattern="^(?!.*://)", description="a folder on a local disk")]
"""A path that is no URL."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReadBy:
    """Annotation of a value with a written form of its own: `Annotated[int, Reader(...)]`.

    Attributes:
        read: the value of the file -> the value of the field; raises `UsageError` without a place.
        says: what messages and the reference page call it, such as "a count".
        schema: JSON Schema of what may be written.
    """

    read: Callable[[Any], Any]
    says: str
    schema: Schema


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Annotation of a text that is one of the names which a registry has when it is read."""

    names: Callable[[], Iterable[str]]


class Needs:
    """Annotation of a field that acts with another one alone: `Needs("truncate")`.

    Where it is given, and the other one is not, it is refused.

    Args:
        fields: of the same section; one of them is enough.
        value: that they have to have; None: any that is not null, false or empty.
        unless: the one value that they must not have.
    """

    def __init__(self, *fields: str, value: Any = None, unless: Any = None) -> None:
        self.fields, self.value, self.unless = fields, value, unless

    def missing(self, section: Any) -> bool:
        """Whether the field would have no effect there."""
        found = [getattr(section, field) for field in self.fields]
        if self.unless is not None:
            return self.unless in found
        return not any(found) if self.value is None else self.value not in found

    def __str__(self) -> str:
        value = self.value if self.unless is None else self.unless
        return " or ".join(f if value is None else f"{f}: {value}" for f in self.fields)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Annotation of a section that may also be somebody else's dataclass, named by import path.

    Attributes:
        base: what the class has to be a subclass of.
        group: entry points by which packages give such classes a short name.
        wrapper: a section, derived from `base`, that stands for classes of another kind, its
            `wraps`: made by its `of(path, class, options)`, shown by its `plain()`. None: there is
            none.
    """

    base: type
    group: str
    wrapper: Any = None


@dataclasses.dataclass(frozen=True)
class ExtraFields:
    """Annotation of the field that takes the names which a section does not know: a mapping."""


Count = Annotated[int, ReadBy(parse_count, "a count", {"type": ["integer", "string"]})]
"""A whole number of at least 1, which may be written `100K`, `1.5M` or `95B`."""


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Proportion = Annotated[float, Meta(ge=0, le=1)]
"""A part of a whole, from 0 to 1."""


def bounds(meta: Meta) -> str:
    """Return a constraint in words: "at least 1", "above 0 and at most 10", "2 or more values"."""
    if meta.ge is not None and meta.ge == meta.le:
        return f"{meta.ge}"
    said = [
        f"{word} {limit:g}" if isinstance(limit, float) else f"{word} {limit:,}"
        for word, limit in (
            ("at least", meta.ge),
            ("above", meta.gt),
            ("at most", meta.le),
            ("below", meta.lt),
        )
        if limit is not None
    ]
    if meta.min_length is not None:
        said.append("not empty" if meta.min_length == 1 else f"{meta.min_length} or more long")
    if meta.pattern is not None:
        said.append(meta.description or f"text of the form {meta.pattern}")
    return " and ".join(said)


def within(hint: Any) -> str:
    """Return the constraints of an annotation in words, in parentheses."""
    limits = [words for note in _metas(hint) if (words := bounds(note))]
    return f" ({', '.join(limits)})" if limits else ""


def example_of(hint: Any) -> str | None:
    """Return what `Meta(examples=[...])` shows of a value, as it stands in a file after the key."""
    return next((note.examples[0] for note in _metas(hint) if note.examples), None)


def reason_of(hint: Any) -> str | None:
    """Return why a value is needed or limited: `Meta(description=...)` without a pattern."""
    return next((n.description for n in _metas(hint) if n.pattern is None and n.description), None)


def _metas(hint: Any) -> list[Meta]:
    return [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Meta)]
