"""`olm-data tokenize`: options and what is printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from olm_data.commands.recipe_options import RUN, recipe_options
from olm_data.commands.running import make_runner, print_done, print_plan
from olm_data.commands.said import note, show_progress
from olm_data.errors import printable
from olm_data.tokenization.recipe import Recipe, read_recipe

if TYPE_CHECKING:
    from olm_data.dataset.plan import Plan
    from olm_data.progress import Progress
    from olm_data.tokenization.request import Request
    from olm_data.tokenization.run import Summary

WORKER_MODULES = ("olm_data.runners.local", "olm_data.tokenization.job", "tokenizers")
FAST_MODULES = ("awkward", "gigatoken")
"""What a worker needs, imported once for all of them."""


@click.command()
@click.argument("inputs", nargs=-1, metavar="[RECIPE.yaml] [INPUT]...")
@recipe_options(
    *("source", "subset", "root", "split", "tokenizer", "output", "format"),
    *("text_column", "id_column", "keep", "where", "exclude_ids", "sample", "seed", "limit"),
    *("shuffle_documents", "separator", "delimiter"),
    *RUN,
    *("encoder", "holdout", "shard_tokens", "container", "special", "eos", "bos"),
    *("on_invalid", "on_unknown", "max_bad", "single_writer", "dedup"),
    *("allow_duplicates", "strict_inputs"),
)
@click.option("--dry-run", is_flag=True, help="Print the plan and a sample; write nothing.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print events as JSON Lines; the last one is the result.",
)
def tokenize(inputs: tuple[str, ...], given: dict[str, Any], dry_run: bool, as_json: bool) -> None:
    """Turn text into a dataset of tokens. Run it again after an interruption: it goes on.

    \b
    olm-data tokenize books/*.jsonl.zst --tokenizer gpt2 --output ./tokens/books
    olm-data tokenize data/*.parquet --text-column content --tokenizer ./my-tokenizer --output s3://b/x
    olm-data tokenize --source fineweb-edu        sample-10BT, gpt2, ./tokens/fineweb-edu-...
    olm-data tokenize recipe.yaml --workers 8     each option is a field of the file, too
    """
    recipe = read_recipe(inputs, given)
    done = run(recipe, dry_run=dry_run, begin=partial(show_progress, "tokenize", as_json=as_json))
    if isinstance(done, Planned):
        print_plan(done.request, done.plan, as_json=as_json)
    else:
        print_done(done.request, done.summary, done.workers, done.progress, as_json=as_json)


class Planned(NamedTuple):
    """What a dry run found."""

    request: Request
    plan: Plan


class Done(NamedTuple):
    """What a run made, `workers` tasks at a time."""

    request: Request
    summary: Summary
    workers: int
    progress: Progress


def run(recipe: Recipe, *, dry_run: bool = False, begin: Callable[[], Progress]) -> Planned | Done:
    """Do what a recipe says.

    Args:
        dry_run: plan it, and write nothing.
        begin: called at the start, returns what shows how far the work is.

    Raises:
        OlmError: see `tokenization.run.tokenize`; fields that do not go together.
    """
    if recipe.runner == "local" and not dry_run:
        from olm_data.runners import fork_server

        # before all else is imported: on another core, the server of the workers imports the same
        fast = () if recipe.encoder == "hf" else FAST_MODULES
        fork_server.start(WORKER_MODULES + fast)
    progress = begin()
    from olm_data.sources.standard_input import spooled
    from olm_data.tokenization.request import prepare, refuse_identical, require_own

    require_own(recipe)
    spool = spooled(recipe.inputs, recipe.format, recipe.runner, note)
    inputs: Sequence[str] = click.get_current_context().with_resource(spool)
    request = prepare(recipe, inputs)
    if recipe.tokenizer is None or recipe.output is None:
        name = printable(request.tokenizer.name)
        note(f"tokenizer {name}, output {printable(request.output)}")
    if dry_run:
        from olm_data.dataset.folder import refuse_place
        from olm_data.storage.store import Store

        refuse_place(Store(request.output, single_writer=recipe.single_writer))
        plan = request.plan()
        if not recipe.allow_duplicates:
            refuse_identical(request.source)
        return Planned(request, plan)
    from olm_data.tokenization import run as verb

    runner = make_runner(recipe)
    summary = verb.tokenize(request, runner=runner, progress=progress)
    return Done(request, summary, runner.workers, progress)
