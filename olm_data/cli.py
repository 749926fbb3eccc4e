"""The `olm-data` command line: parse, call, print. No work is done here.

Results go to stdout, messages and progress to stderr. Exit codes: 0 ok, 1 unexpected, 2 usage,
3 validation or digest mismatch, 4 input refused, 5 local resource, 6 remote storage, 7 conflict,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from keyword import iskeyword
from types import TracebackType

import click

from olm_data import __version__
from olm_data.errors import OlmError, redacted, shown

COMMANDS = (
    "train-tokenizer",
    "tokenize",
    "status",
    "work",
    "add",
    "import",
    "import-mix",
    "pack",
    "mix",
    "export",
    "verify",
    "stats",
    "peek",
    "locate",
    "audit",
    "report",
    "doctor",
    "gc",
)
"""In the order of a working day. Each is `olm_data.commands.<name>`, imported when it is named."""


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_") + ("_" if iskeyword(cmd_name) else "")
        command: click.Command = getattr(import_module(f"olm_data.commands.{name}"), name)
        return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="olm-data")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Turn text into proven token shards and mixtures.

    \b
    olm-data tokenize books/*.jsonl.zst --tokenizer gpt2 --output ./tokens/books
    olm-data mix manifest.yaml
    olm-data verify manifest.lock.json
    olm-data peek ./tokens/books --doc 0
    """


def main() -> None:
    """Entry point: run a command and turn its error into a message and an exit code.

    With `--json` an error is also a line on standard output:
    `{"event": "error", "exit_code": ...}`.
    """
    sys.excepthook = _traceback
    debug = "--debug" in sys.argv[1:]  # accepted before and after the command's name
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    as_json = "--json" in arguments
    try:
        code = cli.main(
            arguments, standalone_mode=False
        )  # what a command gave to ctx.exit, or None
    except click.ClickException as error:
        _error_event(as_json, 2, error.format_message())
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        _error_event(as_json, 130, "interrupted")
        click.echo("interrupted; run the same command again to continue", err=True)
        sys.exit(130)
    except OlmError as error:
        parts = {"where": error.where, "why": error.why, "fix": error.fix}
        _error_event(as_json, error.exit_code, error.what, **parts)
        if debug:
            _traceback(type(error), error, error.__traceback__)
        else:
            click.echo(f"error: {shown(str(error))}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of a pipe has seen enough: `olm-data peek ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:  # a defect: Python prints it, but whoever reads events learns too
        _error_event(as_json, 1, f"{type(error).__name__}: {error}")
        raise
    sys.exit(code or 0)


def _error_event(as_json: bool, exit_code: int, what: str, **parts: str | None) -> None:
    if as_json:
        from olm_data.progress import write_event

        said = {name: value and redacted(value) for name, value in parts.items()}
        write_event(sys.stdout, "error", exit_code=exit_code, what=redacted(what), **said)


def _traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback as Python does, without the credentials that a client's error may hold."""
    text = "".join(traceback.format_exception(kind, error, trace))
    click.echo(shown(text), err=True, nl=False)


if __name__ == "__main__":
    main()
