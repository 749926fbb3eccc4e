"""docs/reference/cli.md names every command and entry point, and every option of each."""

from __future__ import annotations

import re
from pathlib import Path

import click
from support.pages import REPOSITORY

from olm_data.cli import cli
from olm_train.cli import cli as trainer
from olm_train.run.command import CONFIG_OPTIONS, FLAGS, OPTIONS

SUMMARIES = cli.list_commands(click.Context(cli))
COMMANDS = trainer.list_commands(click.Context(trainer))
PAGE = REPOSITORY / "docs" / "reference" / "cli.md"
COMMON = {"--quiet", "--verbose", "--debug", "--storage-options"}
"""Of every command; at the top of the page."""


def sections() -> dict[str, str]:
    """Text of each section of the page, by its heading."""
    _, *parts = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.MULTILINE)
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
