"""The `olm-train` command line: parse and call. A command imports torch when it is named.

`torchrun -m olm_train.run` starts the ranks of a run; `olm-train run` is the same for one process.
"""

from __future__ import annotations

import sys
from importlib import import_module

import click

from olm_data import __version__
from olm_data.command import CommandGroup, reported
from olm_data.sinks import guard

COMMANDS = {
    "run": "Train from a configuration file, or go on with a run.",
    "config": "Print the configuration that a file and options come to.",
    "presets": "Say what GPUs and options each preset takes.",
    "generate": "Continue a text with a trained model.",
    "evaluate": "Print the loss of a trained model on datasets.",
    "export": "Write the weights of a checkpoint as one safetensors file.",
    "convert-checkpoint": "Bring over a checkpoint of an older format.",
}
"""Summaries. Each command is `main` of `olm_train.<name>`, but for the two that are below."""


class _Group(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ("run", "config"):
            return run if cmd_name == "run" else config
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"olm_train.{cmd_name.replace('-', '_')}").main
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="olm-train")
def cli() -> None:
    """Train a language model on a mixture, and use what was trained.

    \b
    olm-train run train.yaml --dry-run
    torchrun --nproc-per-node=8 -m olm_train.run train.yaml
    olm-train generate runs/first --prompt "def "
    """


_AS_TYPED = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(context_settings=_AS_TYPED, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Train in this process; `torchrun -m olm_train.run` takes the same arguments."""
    from olm_train.run.__main__ import entry

    entry(list(arguments))


@click.command(context_settings=_AS_TYPED, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def config(arguments: tuple[str, ...]) -> None:
    """Print the configuration that a file and --name.of.field=value come to, as YAML."""
    from olm_train.run.command import print_config

    sys.exit(print_config(list(arguments)))


def main() -> None:
    """Entry point of the process: run a command, and end the process with its exit code."""
    guard()
    with reported(debug="--debug" in sys.argv[1:]):
        cli(prog_name="olm-train")


if __name__ == "__main__":
    main()
