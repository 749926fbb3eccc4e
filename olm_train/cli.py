"""The `olm-train` command line: parse and call. A command imports torch when it is named.

`torchrun -m olm_train.run` starts the ranks of a run; `olm-train run` is the same for one process.
"""

from __future__ import annotations

import click

from olm_data.command import Program, run_process, run_program, version_option

COMMANDS = {
    "Commands": {
        "run": "Train from a configuration file, or go on with a run.",
        "config": "Print the configuration that a file and options come to.",
    }
}


class OlmTrain(Program):
    core, extensions = COMMANDS, "olm_train.commands"

    def core_command(self, name: str) -> click.Command:
        return {"run": run, "config": config}[name]


@click.group(cls=OlmTrain, context_settings={"help_option_names": ["-h", "--help"]})
@version_option("olm-train")
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
