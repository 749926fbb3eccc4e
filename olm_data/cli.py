"""The `olm-data` command line: parse, call, print. No work is done here.

Results go to stdout, messages and progress to stderr. Exit codes: 0 ok, 1 unexpected, 2 usage,
3 validation or digest mismatch, 4 input refused, 5 local resource, 6 remote storage, 7 conflict,
130 interrupted.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import click

from olm_data import __version__
from olm_data.errors import OlmError, UsageError, ValidationError


class _Group(click.Group):
    """A group that lists its commands in the order of a working day, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


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


@cli.command("train-tokenizer")
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option("--source", help="A named dataset, hf:ORG/NAME[:CONFIG], or pylib.")
@click.option("--subset", help="Which part of a named dataset.")
@click.option("--root", help="A local mirror of a named dataset, with the same layout.")
@click.option("--split", help="Split of an hf: dataset.  [default: train]")
@click.option("--text-column", help="Column or JSON field of the text.  [default: text]")
@click.option("--separator", help='Cut .txt files: "blank-lines", or the string between documents.')
@click.option("--vocab-size", type=int, default=32768, show_default=True, help="Entries, in all.")
@click.option("--output", default="tokenizer.json", show_default=True, help="File to write.")
@click.option(
    "--special",
    multiple=True,
    help="Special token; the first ends documents.  [default: <|endoftext|>]",
)
@click.option("--dry-run", is_flag=True, help="Print what would be read; write nothing.")
def train_tokenizer(
    inputs: tuple[str, ...],
    vocab_size: int,
    output: str,
    special: tuple[str, ...],
    dry_run: bool,
    **reading: str | None,
) -> None:
    """Train a byte-level BPE tokenizer on your text.

    \b
    olm-data train-tokenizer books/*.jsonl.zst --vocab-size 32768 --output tokenizer.json
    olm-data train-tokenizer --source pylib --vocab-size 8192
    """
    from olm_data import train_tokenizer as verb
    from olm_data.sources import resolve_source

    source = resolve_source(inputs, **reading)
    if dry_run:
        size = sum(file.bytes for file in source.inputs)
        click.echo(f"would train {vocab_size:,} entries on {source.name}", nl=False)
        click.echo(f" ({len(source.inputs):,} inputs, {size:,} bytes) and write {output}")
        return
    done = verb.train_tokenizer(
        source, output, vocab_size=vocab_size, special=special or verb.DEFAULT_SPECIAL
    )
    click.echo(
        f"{done.path}: {done.tokenizer.vocab_size:,} entries from {done.documents:,} documents, "
        f"{done.text_bytes / 1e6:,.1f} MB of text ({done.dropped:,} records dropped)"
    )
    if done.tokenizer.vocab_size < vocab_size:
        click.echo(
            f"warning: the text gave no more entries than that ({vocab_size:,} asked)", err=True
        )
    again = [
        *inputs,
        *(f"--{name.replace('_', '-')} {value}" for name, value in reading.items() if value),
    ]
    click.echo(f"next: olm-data tokenize {' '.join(again)} --tokenizer {done.path}", err=True)


@cli.command()
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option("--source", help="A named dataset, hf:ORG/NAME[:CONFIG], or pylib.")
@click.option("--subset", help="Which part of a named dataset.")
@click.option("--root", help="A local mirror of a named dataset, with the same layout.")
@click.option("--split", help="Split of an hf: dataset.  [default: train]")
@click.option("--tokenizer", help="tokenizer.json, a folder with one, or a hub id.")
@click.option("--output", help="Folder or s3://bucket/prefix of the dataset.")
@click.option("--text-column", help="Column or JSON field of the text.  [default: text]")
@click.option("--id-column", help="Column or field of the document's id.  [default: id, if any]")
@click.option("--keep", help="More columns to keep beside each document: a,b.")
@click.option("--separator", help='Cut .txt files: "blank-lines", or the string between documents.')
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: CPUs granted]")
@click.option("--encoder", default="auto", show_default=True, help="auto, hf or gigatoken.")
@click.option("--holdout", default="0", show_default=True, help="Share of documents held out.")
@click.option("--shard-tokens", help="Tokens a shard, about: 100M.  [default: to fit the inputs]")
@click.option(
    "--special",
    type=click.Choice(["plain", "allow", "error"]),
    default="plain",
    show_default=True,
    help="Text that spells a special token: ordinary text, the token itself, or an error.",
)
@click.option("--eos", default="auto", show_default=True, help="After each document; or none.")
@click.option("--bos", default="none", show_default=True, help="Token before each document.")
@click.option(
    "--max-bad", default="0.1%", show_default=True, help="Bad records accepted: a share or a count."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and a sample; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def tokenize(
    inputs: tuple[str, ...],
    tokenizer: str | None,
    output: str | None,
    workers: int | None,
    encoder: str,
    holdout: str,
    shard_tokens: str | None,
    special: Literal["plain", "allow", "error"],
    eos: str,
    bos: str,
    max_bad: str,
    dry_run: bool,
    as_json: bool,
    **reading: str | None,
) -> None:
    """Turn text into a dataset of tokens. Run it again after an interruption: it goes on.

    \b
    olm-data tokenize books/*.jsonl.zst --tokenizer gpt2 --output ./tokens/books
    olm-data tokenize data/*.parquet --text-column content --tokenizer ./my-tokenizer --output s3://b/x
    olm-data tokenize --source fineweb-edu        sample-10BT, gpt2, ./tokens/fineweb-edu-...
    """
    from olm_data import tokenize as verb
    from olm_data import tokenize_report as say
    from olm_data import tokenize_request as asked
    from olm_data.plan import parse_count
    from olm_data.progress import Progress
    from olm_data.runners.local import LocalRunner, granted_cpus
    from olm_data.tokenizer import load_tokenizer

    budget = asked.parse_budget(max_bad)
    share = asked.parse_share(holdout, "--holdout")
    source = asked.find_source(inputs, tokenizer=tokenizer, output=output, **reading)
    spec = load_tokenizer(tokenizer or asked.DEFAULT_TOKENIZER, eos=eos, bos=bos)
    request = asked.Request(
        source=source,
        tokenizer=spec,
        special=special,
        holdout=share,
        shard_tokens=parse_count(shard_tokens) if shard_tokens else None,
    )
    if output is None:
        output = asked.default_output(source, spec)
    if tokenizer is None or output == asked.default_output(source, spec):
        click.echo(f"tokenizer {spec.name}, output {output}", err=True)
    if dry_run:
        plan = request.plan()
        if as_json:
            click.echo(json.dumps({"output": output, **plan.to_json()}))
        else:
            sample = verb.first_documents(request, plan)
            click.echo("\n".join(say.plan_lines(request, plan, output, sample)))
        return
    workers = workers or granted_cpus()
    progress = Progress("tokenize")
    runner = LocalRunner(workers)
    done = verb.tokenize(
        request, output, encoder=encoder, runner=runner, budget=budget, progress=progress
    )
    if as_json:
        click.echo(json.dumps(say.summary_json(done), indent=1))
    else:
        click.echo("\n".join(say.summary_lines(request, done, workers)))
        click.echo(f"next: olm-data verify {output}", err=True)


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
@click.argument("target", metavar="DIR|LOCK")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def verify(ctx: click.Context, target: str, as_json: bool) -> None:
    """Check every byte of a dataset, or of all datasets of a lock, against its digests.

    \b
    olm-data verify ./tokens/books
    olm-data verify manifest.lock.json
    """
    from olm_data import verify as verb
    from olm_data.progress import Progress, duration

    with Progress("verify") as progress:
        report = verb.verify(
            target,
            watch=lambda read, total: progress.update(
                read / max(total, 1), f"{read / max(progress.seconds, 1e-9) / 1e6:,.0f} MB/s"
            ),
        )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        for finding in report.findings:
            click.echo(str(finding))
        for note in report.notes:
            click.echo(f"note: {note}")
        state = "verified" if report.ok else f"FAILED, {len(report.findings)} findings:"
        rate = report.bytes_read / max(report.seconds, 1e-9) / 1e6
        click.echo(
            f"{state} {target}: {report.tokens:,} tokens, {report.documents:,} documents, "
            f"{report.shards:,} shards in {len(report.datasets)} datasets; {report.round_trip} "
            f"documents decoded and encoded again; {duration(report.seconds)}, {rate:,.0f} MB/s"
        )
    if not report.ok:
        click.echo(
            "next: restore the files named above from a copy, or tokenise again into a new output",
            err=True,
        )
        ctx.exit(ValidationError.exit_code)


@cli.command()
@click.argument("target", metavar="DIR|LOCK")
@click.option("--doc", type=int, help="Number of a document.")
@click.option("--row", type=int, help="Number of a row: of the run (LOCK) or of the dataset (DIR).")
@click.option("--of", "source", help="LOCK with --doc: which source's document.")
@click.option("--sequence-length", type=click.IntRange(1), default=2048, help="Of DIR rows.")
@click.option("--full", is_flag=True, help="Show all of the text.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def peek(
    target: str,
    doc: int | None,
    row: int | None,
    source: str | None,
    sequence_length: int,
    full: bool,
    as_json: bool,
) -> None:
    """Show documents of a dataset or rows of a mixture, with their borders, ids and origin.

    \b
    olm-data peek ./tokens/books                 the first documents
    olm-data peek ./tokens/books --doc 17
    olm-data peek manifest.lock.json --row 0     what the first row of training holds
    """
    from olm_data import peek as verb

    if doc is not None and row is not None:
        raise UsageError("--doc and --row do not go together", fix="give one of them")
    views = verb.peek(target, doc=doc, row=row, source=source, sequence_length=sequence_length)
    if as_json:
        click.echo(json.dumps([view.to_json() for view in views], indent=1))
    else:
        click.echo("\n\n".join(verb.render(view, full=full) for view in views))


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
    debug = "--debug" in sys.argv[1:]  # accepted before and after the command's name
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = cli.main(
            arguments, standalone_mode=False
        )  # what a command gave to ctx.exit, or None
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
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
