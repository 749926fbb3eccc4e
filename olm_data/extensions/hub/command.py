"""`olm-data push` and `olm-data pull`: options and what is printed."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from olm_data.commands.said import note, show_bytes, show_progress
from olm_data.errors import typed
from olm_data.printing import emit


@click.command()
@click.argument("target", metavar="FOLDER")
@click.argument("address", metavar="hf://[datasets/]ORG/NAME")
@click.option("--private", is_flag=True, help="Make the repository so that others do not see it.")
@click.option("--revision", metavar="BRANCH", help="Branch to push to.  [default: main]")
@click.option(
    "--licence", metavar="ID", help="Of a dataset's texts, for its card: apache-2.0, cc-by-4.0."
)
@click.option("--dry-run", is_flag=True, help="Print what would be sent; send nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def push(target: str, address: str, as_json: bool, **asked: Any) -> None:
    """Send a dataset or an exported model to the Hugging Face hub, after it was verified.

    What is there already is not sent again: a push that was stopped goes on.

    \b
    olm-data push ./tokens/books hf://datasets/my-lab/books-tokens --private
    olm-data push ./tokens/books hf://datasets/my-lab/books-tokens --licence cc-by-4.0
    olm-data push ./first-hf hf://my-lab/first
    """
    from olm_data.extensions.hub import push as verb

    with show_progress("push") as progress:
        done = verb.push(target, address, watch=partial(show_bytes, progress), **asked)
    emit(done, as_json)
    if done.commit:
        note(f"next: olm-data pull {typed(f'{done.address}@{done.commit}')} FOLDER")


@click.command()
@click.argument("address", metavar="hf://[datasets/]ORG/NAME[@REVISION]")
@click.argument("output", metavar="DIR")
@click.option("--dry-run", is_flag=True, help="Print what would be fetched; make no folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pull(address: str, output: str, dry_run: bool, as_json: bool) -> None:
    """Fetch a dataset or an exported model from the Hugging Face hub, and verify it.

    The folder appears when all of it is there and verified; a pull that was stopped goes on.

    \b
    olm-data pull hf://datasets/my-lab/books-tokens ./tokens/books
    olm-data pull hf://datasets/my-lab/books-tokens@v1.0 ./tokens/books
    olm-data pull hf://my-lab/first ./first-hf
    """
    from olm_data.extensions.hub import pull as verb

    with show_progress("pull") as progress:
        watch = partial(show_bytes, progress)
        done = verb.pull(address, output, dry_run=dry_run, watch=watch)
    emit(done, as_json)
    if not dry_run and done.kind == "dataset":
        note(f"next: olm-data stats {typed(output)}")
