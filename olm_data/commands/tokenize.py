"""`olm-data tokenize`: options and what is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from olm_data.commands.running import (
    Running,
    make_runner,
    print_done,
    print_plan,
    runner_options,
)
from olm_data.commands.said import note, show_progress
from olm_data.errors import printable

if TYPE_CHECKING:
    from olm_data.dataset.plan import Plan
    from olm_data.progress import Progress
    from olm_data.tokenization.request import Request
    from olm_data.tokenization.run import Summary

WORKER_MODULES = ("olm_data.runners.local", "olm_data.tokenization.job", "tokenizers")
FAST_MODULES = ("awkward", "gigatoken")
"""What a worker needs, imported once for all of them."""


@click.command()
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option("--source", help="A named dataset, hf:ORG/NAME[:CONFIG], or pylib.")
@click.option("--subset", help="Which part of a named dataset.")
@click.option("--root", help="A local mirror of a named dataset, with the same layout.")
@click.option("--split", help="Split of an hf: dataset.  [default: train]")
@click.option("--tokenizer", help="tokenizer.json, a folder with one, or a hub id.")
@click.option("--output", help="Folder or s3://bucket/prefix of the dataset.")
@click.option("--format", "form", help="Of standard input (-): jsonl, txt, ...  [default: jsonl]")
@click.option("--text-column", help="Column or JSON field of the text.  [default: text]")
@click.option("--id-column", help="Column or field of the document's id.  [default: id, if any]")
@click.option("--keep", help="More columns to keep beside each document: a,b.")
@click.option("--where", help="Take only records that match: \"score >= 3 and language == 'en'\".")
@click.option("--exclude-ids", help="Leave out the records whose ids are in this file.")
@click.option("--sample", help="Draw this share of the documents, by their text: 1%.")
@click.option("--seed", type=int, help="Seed of the sample and the shuffle.  [default: 0]")
@click.option("--limit", help="Stop after this many documents: 100K.")
@click.option("--shuffle-documents", is_flag=True, help="Shuffle the documents of each shard.")
@click.option("--separator", help='Cut .txt files: "blank-lines", or the string between documents.')
@click.option(
    "--delimiter", help="Separator of the fields in CSV files.  [default: , or tab by name]"
)
@runner_options
@click.option("--encoder", default="auto", show_default=True, help="auto, hf or gigatoken.")
@click.option("--holdout", default="0", show_default=True, help="Share of documents held out.")
@click.option(
    "--shard-tokens", help="Approximate tokens per shard: 100M.  [default: to fit the inputs]"
)
@click.option(
    "--container",
    type=click.Choice(["npy", "raw"]),
    default="npy",
    show_default=True,
    help="Tokens with a NumPy header, or without: for other programs.",
)
@click.option(
    "--special",
    type=click.Choice(["plain", "allow", "error"]),
    default="plain",
    show_default=True,
    help="Text that spells a special token: ordinary text, the token itself, or an error.",
)
@click.option(
    "--eos", default="auto", show_default=True, help="Token after each document, or none."
)
@click.option("--bos", default="none", show_default=True, help="Token before each document.")
@click.option(
    "--on-invalid",
    type=click.Choice(["skip", "replace", "error"]),
    default="skip",
    show_default=True,
    help="Text that is not UTF-8: into the quarantine, mended with U+FFFD, or an error.",
)
@click.option(
    "--on-unknown",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    show_default=True,
    help="Text with what the tokenizer does not know: with unknown tokens, or left out.",
)
@click.option(
    "--max-bad", default="0.1%", show_default=True, help="Bad records accepted: a share or a count."
)
@click.option(
    "--single-writer",
    is_flag=True,
    help="State that no other process writes there: for stores without conditional writes.",
)
@click.option(
    "--dedup", type=click.Choice(["exact"]), help="Keep only the first document of each text."
)
@click.option("--allow-duplicates", is_flag=True, help="Take inputs with the same content.")
@click.option(
    "--strict-inputs", is_flag=True, help="Refuse inputs among which a file would not be read."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and a sample; write nothing.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print events as JSON Lines; the last one is the result.",
)
def tokenize(as_json: bool, **options: Any) -> None:
    """Turn text into a dataset of tokens. Run it again after an interruption: it goes on.

    \b
    olm-data tokenize books/*.jsonl.zst --tokenizer gpt2 --output ./tokens/books
    olm-data tokenize data/*.parquet --text-column content --tokenizer ./my-tokenizer --output s3://b/x
    olm-data tokenize --source fineweb-edu        sample-10BT, gpt2, ./tokens/fineweb-edu-...
    """
    asked, done = run(**options, begin=partial(show_progress, "tokenize", as_json=as_json))
    from olm_data.dataset.plan import Plan

    if isinstance(done, Plan):
        print_plan(asked.request, done, asked.output, as_json=as_json)
    else:
        print_done(asked.request, done, asked.workers, asked.progress, as_json=as_json)


class Asked(NamedTuple):
    """What a command line comes to: `workers` tasks at a time."""

    request: Request
    output: str
    workers: int
    progress: Progress


def run(
    inputs: tuple[str, ...],
    form: str | None,
    tokenizer: str | None,
    output: str | None,
    running: Running,
    encoder: str,
    holdout: str,
    shard_tokens: str | None,
    exclude_ids: str | None,
    sample: str | None,
    seed: int | None,
    shuffle_documents: bool,
    limit: str | None,
    container: Literal["npy", "raw"],
    special: Literal["plain", "allow", "error"],
    eos: str,
    bos: str,
    on_unknown: Literal["keep", "drop"],
    max_bad: str,
    single_writer: bool,
    dedup: str | None,
    allow_duplicates: bool,
    strict_inputs: bool,
    dry_run: bool,
    begin: Callable[[], Progress],
    **reading: str | None,
) -> tuple[Asked, Plan | Summary]:
    """Do what the options of `olm-data tokenize` say; return its plan if it is a dry run.

    Args:
        begin: called at the start, returns what shows how far the work is.

    Raises:
        OlmError: see `tokenization.run.tokenize`; options that do not go together.
    """
    if running.runner == "local" and not dry_run:
        from olm_data.runners import fork_server

        # before all else is imported: on another core, the server of the workers imports the same
        fork_server.start(WORKER_MODULES if encoder == "hf" else WORKER_MODULES + FAST_MODULES)
    progress = begin()
    import msgspec

    from olm_data.counts import parse_count, parse_share
    from olm_data.sources.passed import refuse_passed
    from olm_data.sources.standard_input import spooled
    from olm_data.tokenization import request as asked

    budget = asked.parse_budget(max_bad)
    share = parse_share(holdout, "--holdout")
    asked.require_own(inputs, tokenizer, output)
    spool = spooled(inputs, form, running.runner, note)
    inputs = click.get_current_context().with_resource(spool)
    source = asked.find_source(inputs, tokenizer=tokenizer, output=output, **reading)
    if strict_inputs:
        refuse_passed(source.passed)
    source = replace(source, options=msgspec.structs.replace(source.options, on_unknown=on_unknown))
    from olm_data.dataset.folder import refuse_place
    from olm_data.errors import UsageError
    from olm_data.storage.store import Store
    from olm_data.tokenization import run as verb
    from olm_data.tokenization.selecting import select_documents
    from olm_data.tokenizer.tokenizer import load_tokenizer

    if seed is not None and sample is None and not shuffle_documents:
        raise UsageError(
            "--seed has no effect without --sample or --shuffle-documents", where=f"--seed {seed}"
        )
    spec = load_tokenizer(
        asked.DEFAULT_TOKENIZER if tokenizer is None else tokenizer, eos=eos, bos=bos
    )
    default = asked.default_output(source, spec)
    source = select_documents(
        source,
        exclude_ids=exclude_ids,
        sample=None if sample is None else parse_share(sample, "--sample"),
        seed=seed or 0,
        limit=parse_count(limit) if limit else None,
        output=output or default,
    )
    request = asked.Request(
        source=source,
        tokenizer=spec,
        special=special,
        container=container,
        holdout=share,
        shard_tokens=parse_count(shard_tokens) if shard_tokens else None,
        dedup=dedup is not None,
        shuffle=(seed or 0) if shuffle_documents else None,
    )
    if output is None:
        output = default
    if tokenizer is None or output == default:
        note(f"tokenizer {printable(spec.name)}, output {printable(output)}")
    if dry_run:
        refuse_place(Store(output, single_writer=single_writer))
        plan = request.plan()
        if not allow_duplicates:
            asked.refuse_identical(source)
        return Asked(request, output, 0, progress), plan
    runner = make_runner(running)
    done = verb.tokenize(
        request,
        output,
        encoder=encoder,
        runner=runner,
        budget=budget,
        progress=progress,
        single_writer=single_writer,
        allow_duplicates=allow_duplicates,
    )
    return Asked(request, output, runner.workers, progress), done
