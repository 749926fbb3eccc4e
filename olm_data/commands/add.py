"""`olm-data add`: options and what is printed."""

from __future__ import annotations

import click

from olm_data.commands.running import (
    Running,
    make_runner,
    print_done,
    print_plan,
    runner_options,
)
from olm_data.commands.said import note, show_progress


@click.command()
@click.argument("dataset")
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option("--source", help="A named dataset, hf:ORG/NAME[:CONFIG], or pylib.")
@click.option("--subset", help="Which part of a named dataset.")
@click.option("--root", help="A local mirror of a named dataset, with the same layout.")
@click.option("--split", help="Split of an hf: dataset.  [default: train]")
@click.option("--format", "form", help="Of standard input (-): jsonl, txt, ...  [default: jsonl]")
@click.option("--text-column", help="Column or JSON field of the text.  [default: the dataset's]")
@click.option("--id-column", help="Column of the document's id; or none.  [default: the dataset's]")
@click.option("--separator", help="Cut .txt files, as for tokenize.  [default: the dataset's]")
@click.option(
    "--delimiter", help="Separator of the fields in CSV files.  [default: , or tab by name]"
)
@runner_options
@click.option("--encoder", default="auto", show_default=True, help="auto, hf or gigatoken.")
@click.option(
    "--shard-tokens", help="Approximate tokens per shard: 100M.  [default: to fit the inputs]"
)
@click.option(
    "--max-bad", default="0.1%", show_default=True, help="Bad records accepted: a share or a count."
)
@click.option(
    "--allow-duplicates", is_flag=True, help="Take inputs that the dataset has, or that are equal."
)
@click.option(
    "--strict-inputs", is_flag=True, help="Refuse inputs among which a file would not be read."
)
@click.option(
    "--single-writer",
    is_flag=True,
    help="State that no other process writes there: for stores without conditional writes.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and a sample; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print events and the result as JSON Lines.")
def add(
    dataset: str,
    inputs: tuple[str, ...],
    form: str | None,
    source: str | None,
    separator: str | None,
    running: Running,
    encoder: str,
    shard_tokens: str | None,
    max_bad: str,
    allow_duplicates: bool,
    strict_inputs: bool,
    single_writer: bool,
    dry_run: bool,
    as_json: bool,
    **reading: str | None,
) -> None:
    """Add new inputs to a finished dataset, as a new version. Old shards are not touched.

    \b
    olm-data add ./tokens/books more/*.jsonl.zst
    olm-data add s3://b/tokens/web new.parquet --text-column content

    The tokenizer, its BOS and EOS rule, the share held out and all else that changes bytes are the
    dataset's. Run it again after an interruption: it goes on.
    """
    from olm_data.counts import parse_count
    from olm_data.sources.passed import refuse_passed
    from olm_data.sources.standard_input import spooled
    from olm_data.tokenization import add as verb
    from olm_data.tokenization import request as asked
    from olm_data.tokenization.add_request import Existing

    budget = asked.parse_budget(max_bad)
    tokens = parse_count(shard_tokens) if shard_tokens else None
    existing = Existing.open(dataset, single_writer=single_writer)
    spool = spooled(inputs, form, running.runner, note)
    inputs = click.get_current_context().with_resource(spool)
    found = existing.find_source(inputs, source=source, separator=separator, **reading)
    if strict_inputs:
        refuse_passed(found.passed)
    if dry_run:
        request = existing.request(found, tokens)
        plan = request.plan()
        if not allow_duplicates:
            existing.refuse_known(found)
            asked.refuse_identical(found)
        print_plan(request, plan, dataset, as_json=as_json)
        return
    runner = make_runner(running)
    progress = show_progress("add", as_json=as_json)
    done = verb.add(
        existing,
        found,
        shard_tokens=tokens,
        encoder=encoder,
        runner=runner,
        budget=budget,
        progress=progress,
        allow_duplicates=allow_duplicates,
    )
    request = existing.request(found, tokens)
    print_done(request, done, runner.workers, progress, as_json=as_json)
