"""`olm-data train-tokenizer`: options and what is printed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial

import click

from olm_data.command import CountParam
from olm_data.commands.recipe_options import recipe_options
from olm_data.commands.said import note, show_bytes, show_progress, warn
from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.counts import counted
from olm_data.errors import printable
from olm_data.tokenization.recipe import FieldValue

MOST_ENTRIES = 1 << 31
"""Ids have 32 bits at most."""


@click.command("train-tokenizer")
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@recipe_options("source", "subset", "root", "split", "text_column", "separator", "delimiter")
@click.option(
    "--vocab-size",
    type=CountParam(max=MOST_ENTRIES),
    default=32768,
    show_default=True,
    help="Number of entries.",
)
@click.option("--output", default="tokenizer.json", show_default=True, help="File to write.")
@click.option(
    "--special",
    multiple=True,
    help="Special token; the first ends documents.  [default: <|endoftext|>]",
)
@click.option("--overwrite", is_flag=True, help="Replace another file at the output.")
@click.option("--dry-run", is_flag=True, help="Print what would be read; write nothing.")
def train_tokenizer(
    inputs: tuple[str, ...],
    vocab_size: int,
    output: str,
    special: tuple[str, ...],
    dry_run: bool,
    given: Mapping[str, FieldValue],
    **how: bool,
) -> None:
    """Train a byte-level BPE tokenizer on your text.

    \b
    olm-data train-tokenizer books/*.jsonl.zst --vocab-size 32768 --output tokenizer.json
    olm-data train-tokenizer --source pylib --vocab-size 8192
    """
    from olm_data.dataset.account import DROP_REASONS
    from olm_data.extensions.train_tokenizer import train as verb
    from olm_data.sources import SourceRequest, resolve_source
    from olm_data.sources.passed import passed_lines

    asked = Values({"inputs": list(inputs), **given}, file="the command line")
    source = resolve_source(parse(SourceRequest, asked))
    for line in passed_lines(source.passed):
        warn(f"not read: {line}")
    if dry_run:
        size = sum(file.bytes for file in source.inputs)
        click.echo(f"would train {counted(vocab_size, 'entry')} on {source.name}", nl=False)
        click.echo(f" ({counted(len(source.inputs), 'input')}, {size:,} bytes) and write {output}")
        return
    with show_progress("reading") as progress:
        report = partial(show_bytes, progress, "text; then pairs are merged")
        names = special or verb.DEFAULT_SPECIAL
        done = verb.train_tokenizer(
            source, output, vocab_size=vocab_size, special=names, report=report, **how
        )
    text = done.text
    dropped = counted(text.dropped.total(), "record")
    click.echo(
        f"{done.path}: {counted(done.tokenizer.vocab_size, 'entry')} from "
        f"{counted(text.documents, 'document')}, "
        f"{text.text_bytes / 1e6:,.1f} MB of text ({dropped} dropped)"
    )
    for reason, count in sorted(text.dropped.items()):
        place = printable(text.first[reason])
        warn(f"{counted(count, 'record')} {reason} ({DROP_REASONS[reason]}), the first: {place}")
    if done.tokenizer.vocab_size < vocab_size:
        warn(f"the text gave no more entries than that ({vocab_size:,} asked)")
    again = list(inputs)
    for name, value in given.items():
        again += [f"--{name.replace('_', '-')}", str(value)]
    again += ["--tokenizer", str(done.path), *(["--output", "./tokens/mine"] if inputs else [])]
    note(f"next: olm-data tokenize {printable(shlex.join(again))}")
