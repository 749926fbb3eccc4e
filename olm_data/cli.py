"""The `olm-data` command line: parse, call, print. No work is done here.

Results go to stdout, messages and progress to stderr. Exit codes: 0 ok, 1 unexpected, 2 usage,
3 validation or digest mismatch, 4 input refused, 5 local resource, 6 remote storage, 7 conflict,
130 interrupted.
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import NoReturn

import click

from olm_data.command import Program, run_process, run_program, version_option, with_common_options
from olm_data.commands.said import STORAGE_OPTIONS
from olm_data.errors import UsageError

COMMANDS = {
    "Text to tokens": {
        "tokenize": "Turn text into a dataset of tokens.",
        "add": "Add new inputs to a finished dataset, as a new version.",
        "status": "Show how far a run is, from storage alone.",
        "work": "Do some tasks of a run: what runners start.",
    },
    "Tokens to mixture": {"mix": "Compile a mixture manifest into the lock that training reads."},
    "Look and prove": {},
}
"""Summaries by heading, those that extensions fill among them. Each command is
`olm_data.commands.<name>`."""


class OlmData(Program):
    interrupted = "interrupted; run the same command again to continue"
    core, extensions, internal = COMMANDS, "olm_data.commands", ("work",)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _refuse_empty(args)
        return super().parse_args(ctx, args)

    def core_command(self, name: str) -> click.Command:
        module = name.replace("-", "_")
        command: click.Command = getattr(import_module(f"olm_data.commands.{module}"), module)
        return command

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        return command and with_common_options(command, STORAGE_OPTIONS)


@click.group(cls=OlmData, context_settings={"help_option_names": ["-h", "--help"]})
@version_option("olm-data")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Turn text into proven token shards and mixtures.

    \b
    olm-data tokenize books/*.jsonl.zst --tokenizer gpt2 --output ./tokens/books
    olm-data mix manifest.yaml
    olm-data verify manifest.lock.json
    olm-data show document ./tokens/books 0
    """


def entry() -> None:
    """Entry point of the process: run a command, and end the process with its exit code."""
    run_process(main)


def main() -> NoReturn:
    """Run a command and turn its error into a message and an exit code.

    With `--json` an error is also a line on standard output:
    `{"event": "error", "exit_code": ...}`.
    """
    run_program(cli, "olm-data")


def _refuse_empty(arguments: list[str]) -> None:
    """Refuse an empty word: an unset variable must not stand for a default or for this folder.

    Raises:
        UsageError: there is one.
    """
    for before, word in pairwise(("", *arguments)):
        name, assigned, value = word.partition("=")
        if not word or (name.startswith("--") and assigned and not value):
            raise UsageError(
                "an argument is empty",
                where=f'{before} ""'.strip() if not word else f'{name}=""',
                why="it would be taken for a default, or for this folder",
                fix="is a shell variable unset? write the value, or leave the argument out",
            )


if __name__ == "__main__":
    entry()
