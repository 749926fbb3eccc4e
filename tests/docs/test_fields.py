"""Tables of a reference page are made of the types and docstrings of a configuration."""

from __future__ import annotations

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta
from support.pages import REPOSITORY

MADE = runpy.run_path(str(REPOSITORY / "docs" / "fields.py"))
HEAD, refresh = MADE["HEAD"], MADE["refresh"]


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Attributes:
    name: adam.
    lr: rate | peak.
    """

    name: Literal["adam"] = "adam"
    lr: Annotated[float, Meta(gt=0)] = 1e-3


@dataclass(frozen=True, kw_only=True)
class Training:
    """The step.

    Attributes:
        steps: how many.
        optim: the optimiser.
    """

    steps: Annotated[int, Meta(ge=1)]
    optim: Adam = field(default_factory=Adam)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run.

    Attributes:
        seed: of the weights.
        training: the step.
    """

    seed: int = 0
    training: Training


def page(name: str, table: str = "old\n") -> str:
    return f"by hand\n<!-- fields of {name} -->\n{table}<!-- end of fields -->\nmore\n"


@pytest.mark.parametrize("place", MADE["PAGES"], ids=lambda place: place.name)
def test_the_pages_are_what_the_configurations_say(place: Path) -> None:
    page = place.read_text()
    assert refresh(page, MADE["PAGES"][place]) == page, "python docs/fields.py"


def test_a_table_has_a_line_for_each_field_and_the_rest_stays() -> None:
    assert refresh(page("run"), Run) == page(
        "run", HEAD + "| `seed` | integer | 0 | of the weights |\n"
    )
    found = refresh(page("training"), Run)
    assert "| `training.steps` | integer, at least 1 | - | how many |" in found
    assert "| `training.optim.lr` | number, above 0 | 0.001 |" in found
    assert refresh(found, Run) == found


def test_a_section_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError):
        refresh(page("nothing"), Run)
