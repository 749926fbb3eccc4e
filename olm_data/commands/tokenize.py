"""`olm-data tokenize`: options and what is printed."""

from __future__ import annotations

from collections.abc import Mapping

import click

from olm_data.commands.recipe_options import RUN, recipe_options
from olm_data.commands.running import run_and_print
from olm_data.tokenization.recipe import FieldValue, read_recipe


@click.command()
@click.argument("inputs", nargs=-1, metavar="[RECIPE.yaml] [INPUT]...")
@recipe_options(
    *("source", "subset", "root", "split", "like", "tokenizer", "output", "format"),
    *("text_column", "id_column", "keep", "where", "exclude_ids", "sample", "seed", "filter"),
    *("limit", "shuffle_documents", "separator", "delimiter"),
    *RUN,
    *("encoder", "holdout", "shard_tokens", "container", "special", "eos", "bos"),
    *("chat_template", "train", "train_thinking", "train_ends", "max_tokens", "too_long"),
    *("on_invalid", "on_unknown", "max_bad", "single_writer", "dedup", "minhash"),
    *("decontaminate", "decontaminate_ngram"),
    *("allow_duplicates", "strict_inputs"),
)
@click.option("--dry-run", is_flag=True, help="Print the plan and a sample; write nothing.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print events as JSON Lines; the last one is the result.",
)
def tokenize(
    inputs: tuple[str, ...], given: Mapping[str, FieldValue], dry_run: bool, as_json: bool
) -> None:
    """Turn text into a dataset of tokens. Run it again after an interruption: it goes on.

    \b
    olm-data tokenize books/*.jsonl.zst --tokenizer gpt2 --output ./tokens/books
    olm-data tokenize data/*.parquet --text-column content --tokenizer ./my-tokenizer --output s3://b/x
    olm-data tokenize --source fineweb-edu        sample-10BT, gpt2, ./tokens/fineweb-edu-...
    olm-data tokenize recipe.yaml --workers 8     each option is a field of the file, too
    olm-data tokenize --like ./tokens/books --tokenizer ./my-tokenizer --output ./tokens/books-mine
    """
    run_and_print(read_recipe(inputs, given), "tokenize", dry_run=dry_run, as_json=as_json)
