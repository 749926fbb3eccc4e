"""`olm-data show`: options and what is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from olm_data.command import CommandGroup, CountParam
from olm_data.commands.said import note, refuse_given, show_progress, warn
from olm_data.counts import counted
from olm_data.errors import UsageError
from olm_data.printing import emit, print_json

if TYPE_CHECKING:
    from olm_data.extensions.show.documents import Query
    from olm_data.extensions.show.steps import Batches, StepOptions
    from olm_data.progress import Progress
    from olm_data.rows.views import LockRows

SEQUENCE_LENGTH = 2048
STEPS = ("run", "global_batch", "skip", "world", "micro_batch_size")
"""The options that say how rows become steps."""


def step_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how rows become steps; the command gets them as `steps`."""

    @click.option(
        "--run", metavar="RUN", help="Run to take batch sizes, skipped rows and what is past from."
    )
    @click.option("--global-batch", type=CountParam(1), help="Tokens of a step, without --run.")
    @click.option("--skip", multiple=True, metavar="A:B", help="Rows left out, without --run.")
    @click.option("--world", type=CountParam(1), help="Ranks of the run: names each row's.")
    @click.option(
        "--micro-batch-size",
        type=CountParam(1),
        help="With --world: tokens of a micro-batch, without --run.",
    )
    @wraps(command)
    def with_steps(*args: Any, **values: Any) -> Any:
        from olm_data.extensions.show.steps import StepOptions

        steps = StepOptions(**{name: values.pop(name) for name in STEPS})
        return command(*args, steps=steps, **values)

    return with_steps


def shown_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of how much is shown, and how."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print as JSON."),
        click.option(
            "--full", is_flag=True, help="Show all of the text, and of the rows that see it."
        ),
        click.option("--first", type=CountParam(1), help="Most of them to show."),
    ):
        command = option(command)
    return command


@click.group(cls=CommandGroup)
def show() -> None:
    """Show documents, rows and steps: decoded, with borders, ids and where they come from.

    \b
    olm-data show document ./tokens/books 17
    olm-data show row manifest.lock.json 0            what the first row of training holds
    olm-data show step manifest.lock.json 120 --run runs/small
    olm-data show search manifest.lock.json "white whale"

    Needs no index: the order is a function, and so is its inverse. On a terminal tokens have
    backgrounds and special tokens are red; NO_COLOR turns that off.
    """


@show.command(short_help="Documents by number or id, and which steps see them.")
@click.argument("target", metavar="DIR|LOCK")
@click.argument("address", required=False, metavar="[DOCUMENT]")
@click.option("--id", "identifier", help="Id of a document in its source.")
@click.option("--of", "source", help="LOCK: only documents of this source.")
@step_options
@shown_options
def document(
    target: str,
    address: str | None,
    identifier: str | None,
    source: str | None,
    steps: StepOptions,
    first: int | None,
    full: bool,
    as_json: bool,
) -> None:
    """Show documents of a dataset; of a mixture, also every row and step that sees them.

    \b
    olm-data show document ./tokens/books                       the first documents
    olm-data show document ./tokens/books 17                    or SHARD:NUMBER
    olm-data show document ./tokens/books --id isbn-0141439512
    olm-data show document manifest.lock.json books:17 --run runs/small
    olm-data show document manifest.lock.json --id page-17 --global-batch 65536
    """
    from olm_data.extensions.show.documents import Query

    if address is not None and identifier is not None:
        raise UsageError("a document is named twice", where="--id", fix="leave one of them out")
    query = Query(address=address, id=identifier, most=first, full=full)
    _documents(target, query, source, steps, as_json)


@show.command(short_help="Documents that hold a text.")
@click.argument("target", metavar="DIR|LOCK")
@click.argument("text")
@click.option("--of", "source", help="LOCK: only documents of this source.")
@step_options
@shown_options
def search(
    target: str,
    text: str,
    source: str | None,
    steps: StepOptions,
    first: int | None,
    full: bool,
    as_json: bool,
) -> None:
    """Show documents that hold a text, exactly as it is; of a mixture, also which rows see it.

    \b
    olm-data show search ./tokens/books "white whale" --first 10
    olm-data show search manifest.lock.json "white whale" --run runs/small
    """
    from olm_data.extensions.show.documents import FIRST_HITS, Query

    found = _documents(target, Query(text=text, most=first, full=full), source, steps, as_json)
    if not as_json and found >= (first or FIRST_HITS):
        note(f"there may be more: --first {2 * (first or FIRST_HITS)} shows more of them")


@show.command(short_help="Rows of a run, or of a dataset's own stream.")
@click.argument("target", metavar="DIR|LOCK")
@click.argument("number", type=CountParam(0), default=0, metavar="[ROW]")
@click.option(
    "--sequence-length",
    type=CountParam(1),
    help=f"DIR: tokens of a row.  [default: {SEQUENCE_LENGTH}]",
)
@shown_options
def row(
    target: str,
    number: int,
    sequence_length: int | None,
    first: int | None,
    full: bool,
    as_json: bool,
) -> None:
    """Show rows of the run that a lock describes, or of a dataset's own stream, from ROW on.

    \b
    olm-data show row manifest.lock.json 0 --first 2
    olm-data show row ./tokens/books 17 --sequence-length 512
    """
    from olm_data.dataset.dataset import Dataset
    from olm_data.dataset.target import dataset_root, is_lock
    from olm_data.extensions.show.render import render
    from olm_data.mixture.lock import Lock
    from olm_data.rows.views import LockRows, RowViews

    rows: LockRows | RowViews
    if is_lock(target):
        refuse_given(("sequence_length",), "a dataset, and the lock has one")
        rows = LockRows(Lock.read(target))
    else:
        dataset = Dataset.open(dataset_root(target))
        rows = RowViews(dataset, sequence_length or SEQUENCE_LENGTH)
    stop = max(number + 1, min(number + (first or 1), rows.total))
    views = [rows.view(n) for n in range(number, stop)]
    if as_json:
        print_json(views)
        return
    tokenizers = (rows.tokenizer_of(one.source) if _colour() else None for one in views)
    _echo(render(one, own, full=full) for one, own in zip(views, tokenizers, strict=True))


@show.command(short_help="What a step saw, or will see.")
@click.argument("target", metavar="LOCK")
@click.argument("number", type=int, metavar="STEP")
@step_options
@click.option("--rank", type=CountParam(0), help="With --world: only rows of this rank.")
@click.option("--micro-batch", type=CountParam(0), help="With --rank: only this one, from 0.")
@shown_options
def step(
    target: str,
    number: int,
    steps: StepOptions,
    rank: int | None,
    micro_batch: int | None,
    first: int | None,
    full: bool,
    as_json: bool,
) -> None:
    """Show what a step saw, or will see; steps are counted from 1, as in the run's log.

    \b
    olm-data show step manifest.lock.json 120 --run runs/small
    olm-data show step manifest.lock.json 120 --global-batch 65536 --world 8 --rank 3
    """
    from olm_data.extensions.show.render import step_lines
    from olm_data.extensions.show.steps import show_step, unknown_size
    from olm_data.mixture.lock import Lock
    from olm_data.rows.views import LockRows

    batches = _batches(LockRows(Lock.read(target)), steps)
    if batches is None:
        raise unknown_size("show step")
    view = show_step(batches, number, rank=rank, microbatch=micro_batch, most=first)
    if as_json:
        print_json(view)
        return
    for line in step_lines(batches, view, full=full, colour=_colour()):
        click.echo(line, color=_colour())


@show.command(short_help="What the loss ledger of a run says.")
@click.argument("run", metavar="RUN")
@click.option("--step", "number", type=CountParam(1), help="A step: what raised its loss.")
@click.option("--source", help="Only this source.")
@click.option("--document", "address", metavar="ADDRESS", help="A document: SOURCE:NUMBER.")
@click.option("--top", type=CountParam(1), default=10, help="Documents shown.  [default: 10]")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def ledger(
    run: str, number: int | None, source: str | None, address: str | None, top: int, as_json: bool
) -> None:
    """Show the loss of sources and documents as they were trained.

    \b
    olm-data show ledger runs/small                   over time; never learned; memorised
    olm-data show ledger runs/small --step 120        which documents a spike was
    olm-data show ledger runs/small --document web:17
    olm-data show ledger runs/small --source web --top 50

    Needs a run with trainer.callbacks.loss_ledger. Losses are nats a label; the excess of a piece
    is what it has beyond the mean of its source.
    """
    from pathlib import Path

    from olm_data.extensions.show.ledger import show_document_losses, show_step_losses, summarise

    folder = Path(run)
    if address is not None:
        if number is not None or source is not None:
            raise UsageError(
                "--document is shown in all steps", fix="leave --step and --source out"
            )
        emit(show_document_losses(folder, address), as_json)
    elif number is not None:
        emit(show_step_losses(folder, number, top, source), as_json)
    else:
        emit(summarise(folder, top, source), as_json)


def _documents(
    target: str, query: Query, source: str | None, steps: StepOptions, as_json: bool
) -> int:
    """Print documents of a dataset, or of a lock with where they are seen; return how many."""
    from olm_data.dataset.dataset import Dataset
    from olm_data.dataset.target import dataset_root, is_lock
    from olm_data.extensions.show.documents import show_documents, show_sightings
    from olm_data.extensions.show.render import document_lines, render
    from olm_data.mixture.lock import Lock
    from olm_data.rows.views import LockRows

    views: Sequence[object]
    text, full, colour = query.text or "", query.full, _colour()
    if is_lock(target):
        rows = LockRows(Lock.read(target))
        batches = _batches(rows, steps)
        with show_progress("search") as progress:
            found = show_sightings(rows, query, batches, source=source, watch=_watch(progress))
        views = found
        tokenizers = (rows.tokenizer_of(one.source) if colour else None for one in found)
        lines = (
            "\n".join(document_lines(one, own, text=text, full=full))
            for one, own in zip(found, tokenizers, strict=True)
        )
    else:
        refuse_given(("source", *STEPS), "a mixture, and this is a dataset")
        dataset = Dataset.open(dataset_root(target))
        with show_progress("search") as progress:
            documents = show_documents(dataset, query, watch=_watch(progress))
        views, tokenizer = documents, dataset.tokenizer if colour else None
        lines = (render(one, tokenizer, full=full, found=text) for one in documents)
    if as_json:
        print_json(views)
    else:
        _echo(lines)
    return len(views)


def _batches(rows: LockRows, options: StepOptions) -> Batches | None:
    """Return the steps that the options describe; say what of the run's log is left out."""
    from olm_data.extensions.show.steps import Batches

    if options.run is not None:
        refuse_given(("global_batch", "skip"), "steps without --run, which has its own")
    batches = Batches.of(rows, options)
    for remark in batches.run.notes if batches and batches.run else ():
        warn(remark)
    return batches


def _watch(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress.update(done / total, f"{counted(done, 'document')}")


def _echo(shown: Iterator[str]) -> None:
    """Print views, an empty line between them."""
    for number, text in enumerate(shown):
        click.echo("\n" * bool(number) + text, color=_colour())


def _colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
