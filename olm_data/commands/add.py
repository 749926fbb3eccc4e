"""`olm-data add`: options and what is printed."""

from __future__ import annotations

from collections.abc import Mapping

import click

from olm_data.commands.recipe_options import RUN, recipe_options
from olm_data.commands.running import run_and_print
from olm_data.tokenization.recipe import FieldValue, read_recipe


@click.command()
@click.argument("dataset")
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@recipe_options(
    *("source", "subset", "root", "split", "format"),
    *("text_column", "id_column", "separator", "delimiter", "filter"),
    *RUN,
    *("encoder", "shard_tokens", "max_bad", "allow_duplicates", "strict_inputs", "single_writer"),
    helps={
        "text_column": "Column or JSON field of the text.  [default: the dataset's]",
        "id_column": "Column of the document's id; or none.  [default: the dataset's]",
        "separator": "Cut .txt files, as for tokenize.  [default: the dataset's]",
        "filter": "That of the dataset, where it has one: module:function.",
        "allow_duplicates": "Take inputs that the dataset has, or that are equal.",
    },
)
@click.option("--dry-run", is_flag=True, help="Print the plan and a sample; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print events and the result as JSON Lines.")
def add(
    dataset: str,
    inputs: tuple[str, ...],
    given: Mapping[str, FieldValue],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Add new inputs to a finished dataset, as a new version. Old shards are not touched.

    \b
    olm-data add ./tokens/books more/*.jsonl.zst
    olm-data add s3://b/tokens/web new.parquet --text-column content

    The tokenizer, its BOS and EOS rule, the share held out and all else that changes bytes are the
    dataset's. Run it again after an interruption: it goes on.
    """
    recipe = read_recipe((), {**given, "inputs": inputs})
    run_and_print(recipe, "add", dataset=dataset, dry_run=dry_run, as_json=as_json)
