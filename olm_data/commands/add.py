"""`olm-data add`: options and what is printed."""

from __future__ import annotations

from typing import Any

import click

from olm_data.commands.recipe_options import RUN, recipe_options
from olm_data.commands.running import make_runner, print_done, print_plan
from olm_data.commands.said import note, show_progress
from olm_data.tokenization.recipe import read_recipe


@click.command()
@click.argument("dataset")
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@recipe_options(
    *("source", "subset", "root", "split", "format"),
    *("text_column", "id_column", "separator", "delimiter"),
    *RUN,
    *("encoder", "shard_tokens", "max_bad", "allow_duplicates", "strict_inputs", "single_writer"),
    helps={
        "text_column": "Column or JSON field of the text.  [default: the dataset's]",
        "id_column": "Column of the document's id; or none.  [default: the dataset's]",
        "separator": "Cut .txt files, as for tokenize.  [default: the dataset's]",
        "allow_duplicates": "Take inputs that the dataset has, or that are equal.",
    },
)
@click.option("--dry-run", is_flag=True, help="Print the plan and a sample; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print events and the result as JSON Lines.")
def add(
    dataset: str, inputs: tuple[str, ...], given: dict[str, Any], dry_run: bool, as_json: bool
) -> None:
    """Add new inputs to a finished dataset, as a new version. Old shards are not touched.

    \b
    olm-data add ./tokens/books more/*.jsonl.zst
    olm-data add s3://b/tokens/web new.parquet --text-column content

    The tokenizer, its BOS and EOS rule, the share held out and all else that changes bytes are the
    dataset's. Run it again after an interruption: it goes on.
    """
    from olm_data.sources.passed import refuse_passed
    from olm_data.sources.standard_input import spooled
    from olm_data.tokenization import add as verb
    from olm_data.tokenization.add_request import Existing
    from olm_data.tokenization.request import refuse_identical

    recipe = read_recipe((), given | {"inputs": list(inputs)})
    existing = Existing.open(dataset, single_writer=recipe.single_writer)
    spool = spooled(recipe.inputs, recipe.format, recipe.runner, note)
    source = existing.find_source(recipe, click.get_current_context().with_resource(spool))
    if recipe.strict_inputs:
        refuse_passed(source.passed)
    request = existing.request(recipe, source)
    if dry_run:
        plan = request.plan()
        if not recipe.allow_duplicates:
            existing.refuse_known(source)
            refuse_identical(source)
        print_plan(request, plan, as_json=as_json)
        return
    runner = make_runner(recipe)
    progress = show_progress("add", as_json=as_json)
    done = verb.add(existing, recipe, source, runner=runner, progress=progress)
    print_done(request, done, runner.workers, progress, as_json=as_json)
