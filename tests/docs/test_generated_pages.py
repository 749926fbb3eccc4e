"""Pages, tables and schemas are what docs/*.py make of types, docstrings and commands."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from msgspec import Meta
from support.hf_page import PAGE, rendered
from support.pages import REPOSITORY

from olm_data.cli import cli
from olm_data.tokenization.recipe import Recipe
from olm_train.cli import cli as trainer
from olm_train.extensions.hf.table import FAMILIES
from olm_train.run.command import CONFIG_OPTIONS, FLAGS, OPTIONS

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize("package", ["olm_data", "olm_train"])
def test_a_page_of_names_is_what_the_docstrings_say(package: str) -> None:
    made = runpy.run_path(str(DOCS / "api.py"))["page"](package)
    assert (DOCS / "reference" / "api" / f"{package}.md").read_text() == made, "python docs/api.py"


def test_llms_txt_names_pages_that_are_there() -> None:
    named = re.findall(r"\]\(([^)]+)\)", (REPOSITORY / "llms.txt").read_text())
    assert len(named) > 20
    assert [place for place in named if not (REPOSITORY / place).is_file()] == []


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


def test_the_page_is_that_of_the_table() -> None:
    page = PAGE.read_text()
    assert rendered(page) == page, "python tests/support/hf_page.py"
    assert all(f"### {family.name}\n" in page for family in FAMILIES)


SCHEMAS = runpy.run_path(str(REPOSITORY / "docs" / "schemas.py"))


@pytest.mark.parametrize("path", SCHEMAS["SCHEMAS"], ids=lambda path: path.name)
def test_a_schema_is_that_of_the_types(path: Path) -> None:
    text = SCHEMAS["encoded"](SCHEMAS["SCHEMAS"][path]())
    assert path.read_text() == text, "python docs/schemas.py"
    assert str(Path.home()) not in text


def test_a_field_has_the_words_of_its_docstring() -> None:
    assert SCHEMAS["train"]()["$defs"]["AdamWConfig"]["properties"]["lr"]["description"]
    fields = SCHEMAS["recipe"]()["$defs"]["Recipe"]["properties"]
    assert list(fields) == list(Recipe.__struct_fields__)
    assert all(field["description"] for field in fields.values())


def test_the_schemas_are_valid_json() -> None:
    assert all(json.loads(path.read_bytes())["$defs"] for path in SCHEMAS["SCHEMAS"])


SUMMARIES = cli.list_commands(click.Context(cli))


COMMANDS = trainer.list_commands(click.Context(trainer))


CLI_PAGE = REPOSITORY / "docs" / "reference" / "cli.md"


COMMON = {"--quiet", "--verbose", "--debug", "--storage-options"}


"""Of every command; at the top of the page."""


def sections() -> dict[str, str]:
    """Text of each section of the page, by its heading."""
    _, *parts = re.split(r"^## (.+)\n", CLI_PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def options(command: click.Command) -> set[str]:
    """The long names of a command's options, those of its subcommands among them."""
    if isinstance(command, click.Group):
        return set().union(*map(options, command.commands.values()))
    named = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    return {max(option.opts, key=len) for option in named} - COMMON


def wanted() -> dict[str, set[str]]:
    """Heading -> options that its section must name."""
    context = click.Context(cli)
    found = {}
    for name in SUMMARIES:
        command = cli.get_command(context, name)
        assert command is not None
        found[f"olm-data {name}"] = options(command)
    for name in COMMANDS:
        command = trainer.get_command(context, name)
        assert command is not None
        found[f"olm-train {name}"] = (
            options(command) if name not in ("run", "config") else {*FLAGS, *OPTIONS} - {"-h"}
        )
    found["olm-train config"] = {*CONFIG_OPTIONS}
    return found


def test_every_option_of_every_command_is_on_the_page_and_no_other() -> None:
    known = set().union(*wanted().values()) | COMMON | {"--help", "--version"}
    foreign = {"--model", "--name", "--nproc-per-node", "--requeue", "--data-path"}
    for heading, options in wanted().items():
        shown = set(re.findall(r"--[a-z][a-z-]+", sections()[heading]))
        assert options - shown == set(), f"not in {heading}"
        assert shown - known - foreign == set(), f"of no command, in {heading}"


def test_the_page_has_a_section_for_each_command_and_for_nothing_else() -> None:
    assert set(sections()) == set(wanted())


def test_each_help_begins_with_an_example(repository: Path) -> None:
    context = click.Context(cli)
    for name in SUMMARIES:
        command = cli.get_command(context, name)
        assert command is not None
        assert f"olm-data {name} " in (command.help or ""), name
    for name in COMMANDS:
        command = trainer.get_command(context, name)
        assert command is not None
        assert name in ("run", "config") or f"olm-train {name} " in (command.help or ""), name


def test_subcommands_are_explained_by_an_example_and_a_row_of_the_page() -> None:
    show = cli.get_command(click.Context(cli), "show")
    assert isinstance(show, click.Group)
    for name, command in show.commands.items():
        assert f"olm-data show {name} " in (command.help or ""), name
        assert f"| `{name}` |" in sections()["olm-data show"], name
