"""Annotations and docstrings of a configuration, read into words."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from olm_data.config.convert import describe
from olm_data.config.docs import attributes
from olm_data.config.hints import Count, FilePath, OneOf, bounds


class Color(StrEnum):
    red = "red"
    blue = "blue"


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base.

    Attributes:
        rate: from the base,
            on two lines.
        one, two: both.
    """

    name: Literal["base"] = "base"
    rate: float = 1.0
    one: int = 1
    two: int = 2


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    """One that says more.

    Attributes:
        one: its own.

    Raises:
        Nothing: ever.
    """

    extra: list[int] = field(default_factory=list)


def test_attributes_are_those_of_a_class_over_those_of_its_bases() -> None:
    both = {"rate": "from the base, on two lines.", "two": "both."}
    assert attributes(Base) == {**both, "one": "both."}
    assert attributes(Derived) == {**both, "one": "its own."}


@pytest.mark.parametrize(
    ("hint", "says"),
    [
        (int, "an integer"),
        (float | None, "a number or null"),
        (FilePath, "a path"),
        (Color, "one of red, blue"),
        (Literal["a", "b"] | bool, "one of a, b or true or false"),
        (list[str], "a list (text each)"),
        (dict[str, float], "a mapping of names (a number each)"),
        (Base, "a mapping with name, rate, one, two"),
        (Annotated[int, Meta(ge=1)], "an integer"),
        (bool | Annotated[int, Meta(ge=2)], "true or false or an integer (at least 2)"),
        (Annotated[str, OneOf(lambda: ["a", "b"])], "one of a, b"),
        (Count | None, "a count or null"),
    ],
)
def test_a_type_is_described_in_words(hint: Any, says: str) -> None:
    assert describe(hint) == says


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (Meta(ge=1), "at least 1"),
        (Meta(gt=0, le=10_000_000), "above 0 and at most 10,000,000"),
        (Meta(ge=0.5, lt=1.0), "at least 0.5 and below 1"),
        (Meta(min_length=1), "not empty"),
        (Meta(pattern="^a", description="a word that begins with a"), "a word that begins with a"),
    ],
)
def test_a_constraint_is_told_in_words(meta: Meta, says: str) -> None:
    assert bounds(meta) == says
