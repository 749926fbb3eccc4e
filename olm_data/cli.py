"""The `olm-data` command line: parse, call, print. No work is done here.

Results go to stdout, messages and progress to stderr. Exit codes: 0 ok, 1 unexpected, 2 usage,
3 validation or digest mismatch, 4 input refused, 5 local resource, 6 remote storage, 7 conflict,
130 interrupted.
"""

from __future__ import annotations

import json
import sys

import click

from olm_data import __version__
from olm_data.errors import OlmError


class _Group(click.Group):
    """A group that lists its commands in the order of a working day, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="olm-data")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Turn text into proven token shards and mixtures.

    \b
    olm-data tokenize books/*.jsonl.zst --tokenizer gpt2 --output ./tokens/books
    olm-data mix manifest.yaml
    olm-data verify manifest.lock.json
    olm-data peek ./tokens/books --doc 0
    """
    ctx.obj = debug


@cli.command()
@click.argument("manifest", type=click.Path(dir_okay=False))
@click.option("--output", help="Lock file to write.  [default: NAME.lock.json beside it]")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace another lock at the output.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def mix(manifest: str, output: str | None, dry_run: bool, overwrite: bool, as_json: bool) -> None:
    """Compile a mixture manifest into the lock that training takes.

    \b
    olm-data mix manifest.yaml                  writes manifest.lock.json
    olm-data mix manifest.yaml --dry-run        prints the plan only
    """
    from rich.console import Console

    from olm_data import mix as verb

    done = verb.mix(manifest, output, dry_run=dry_run, overwrite=overwrite)
    if as_json:
        result = {"lock": done.path, "status": done.status, **verb.plan(done.lock)}
        click.echo(json.dumps(result, indent=1))
    else:
        verb.print_plan(done.lock, Console(width=None if sys.stdout.isatty() else 140))
    for warning in verb.warnings(done.lock):
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"{done.status}: {done.path} (digest {done.lock.digest[:12]})", err=True)
    following = (
        f"olm-data mix {manifest}"
        if dry_run
        else f"torchrun -m olm_train.run train.yaml --data_loader.mixture={done.path}"
    )
    click.echo(f"next: {following}", err=True)


@cli.command()
@click.argument("lock", type=click.Path(dir_okay=False))
@click.option("--run", type=click.Path(file_okay=False), help="save_folder of a run to report on.")
@click.option("--output", default="report.html", show_default=True, help="HTML file to write.")
def report(lock: str, run: str | None, output: str) -> None:
    """Write one self-contained HTML page about a mixture, and about a run of it.

    \b
    olm-data report mixture.lock.json --run ./runs/first --output report.html
    """
    from olm_data.report import write_report

    click.echo(write_report(lock, run, output))


def main() -> None:
    """Entry point: run a command and turn its error into a message and an exit code."""
    debug = "--debug" in sys.argv[1:]
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; run the same command again to continue", err=True)
        sys.exit(130)
    except OlmError as error:
        if debug:
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
