"""The `olm-train` command line: parse and call. A command imports torch when it is named.

`torchrun -m olm_train.run` starts the ranks of a run; `olm-train run` is the same for one process.
"""

from __future__ import annotations

from importlib import import_module

import click

from olm_data import __version__
from olm_data.command import CommandGroup, run_process, run_program

COMMANDS = {
    "run": "Train from a configuration file, or go on with a run.",
    "config": "Print the configuration that a file and options come to.",
    "presets": "Say what GPUs and options each preset takes.",
    "watch": "Show runs in a browser while they train.",
    "generate": "Continue a text with a trained model.",
    "chat": "Talk with a trained model in the terminal.",
    "serve": "Answer on loopback as OpenAI's API does, for trying a model out.",
    "evaluate": "Print loss, bits per byte and scores of tasks of a model.",
    "lm-eval": "Run tasks of lm-evaluation-harness on a checkpoint.",
    "track": "Show a run on a tracker: W&B, Comet, TensorBoard, trackio.",
    "export": "Write the weights of a checkpoint for other programs, or as one file.",
    "notify": "Tell a webhook when a run is gone without a word.",
    "merge": "Write the mean of the weights of several checkpoints.",
}
"""Summaries. Each command is `main` of `olm_train.<name>`, but for the two that are below."""
MODULES = {
    "generate": "generate.command",
    "chat": "generate.chat",
    "serve": "generate.serve",
    "lm-eval": "harness.command",
}
"""Of commands that are in a room with other modules."""


class _Group(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ("run", "config"):
            return run if cmd_name == "run" else config
        if cmd_name not in COMMANDS:
            return None
        module = MODULES.get(cmd_name, cmd_name.replace("-", "_"))
        command: click.Command = import_module(f"olm_train.{module}").main
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
def run(arguments: tuple[str, ...]) -> int:
    """Train in this process; `torchrun -m olm_train.run` takes the same arguments."""
    from olm_train.run.command import main

    return main(list(arguments))


@click.command(context_settings=_AS_TYPED, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def config(arguments: tuple[str, ...]) -> int:
    """Print the configuration that a file and --name.of.field=value come to, as YAML."""
    from olm_train.run.command import print_config

    return print_config(list(arguments))


def main(*words: str) -> None:
    """Entry point of the process: run a command, and end the process with its exit code.

    Args:
        words: what stands before the words of the command line, such as a command's name.
    """
    run_process(lambda: run_program(cli, "olm-train", *words))


if __name__ == "__main__":
    main()
