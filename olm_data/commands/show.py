"""`olm-data show`: options and what is printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from olm_data.command import CommandGroup
from olm_data.commands.said import note, refuse_given, show_progress, warn
from olm_data.errors import UsageError

if TYPE_CHECKING:
    from olm_data.mixture.lock import Lock
    from olm_data.progress import Progress
    from olm_data.rows.views import RowView
    from olm_data.run_log.run import Run
    from olm_data.show.documents import Query
    from olm_data.show.steps import Batches

SEQUENCE_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What the options say of a run's steps."""

    run: str | None
    global_batch: int | None
    skip: tuple[str, ...]
    world: int | None
    micro_batch_size: int | None


def step_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how rows become steps; the command gets them as `steps`."""

    @click.option(
        "--run", metavar="RUN", help="Run to take batch sizes, skipped rows and what is past from."
    )
    @click.option("--global-batch", type=click.IntRange(1), help="Tokens of a step, without --run.")
    @click.option("--skip", multiple=True, metavar="A:B", help="Rows left out, without --run.")
    @click.option("--world", type=click.IntRange(1), help="Ranks of the run: names each row's.")
    @click.option(
        "--micro-batch-size",
        type=click.IntRange(1),
        help="With --world: tokens of a micro-batch, without --run.",
    )
    @wraps(command)
    def with_steps(
        *args: Any,
        run: str | None,
        global_batch: int | None,
        skip: tuple[str, ...],
        world: int | None,
        micro_batch_size: int | None,
        **rest: Any,
    ) -> Any:
        steps = StepOptions(
            run=run,
            global_batch=global_batch,
            skip=skip,
            world=world,
            micro_batch_size=micro_batch_size,
        )
        return command(*args, steps=steps, **rest)

    return with_steps


def shown_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of how much is shown, and how."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print as JSON."),
        click.option(
            "--full", is_flag=True, help="Show all of the text, and of the rows that see it."
        ),
        click.option("--first", type=click.IntRange(1), help="Most of them to show."),
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
    from olm_data.show.documents import Query

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
    from olm_data.show.documents import FIRST_HITS, Query

    found = _documents(target, Query(text=text, most=first, full=full), source, steps, as_json)
    if not as_json and found >= (first or FIRST_HITS):
        note(f"there may be more: --first {2 * (first or FIRST_HITS)} shows more of them")


@show.command(short_help="Rows of a run, or of a dataset's own stream.")
@click.argument("target", metavar="DIR|LOCK")
@click.argument("number", type=click.IntRange(0), default=0, metavar="[ROW]")
@click.option(
    "--sequence-length",
    type=click.IntRange(1),
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
    from olm_data.mixture.lock import Lock
    from olm_data.packing.concat import rows_in
    from olm_data.rows.views import LockRows, view_row
    from olm_data.show.render import render
    from olm_data.target import dataset_root, is_lock

    if is_lock(target):
        refuse_given(("sequence_length",), "a dataset, and the lock has one")
        lock = Lock.read(target)
        total, view = lock.total_rows, LockRows(lock).view
    else:
        dataset, length = Dataset.open(dataset_root(target)), sequence_length or SEQUENCE_LENGTH
        total, spec = rows_in(dataset.tokens, length), dataset.tokenizer

        def view(row: int) -> RowView:
            return view_row(dataset, spec, row, length)

    views = [view(n) for n in range(number, max(number + 1, min(number + (first or 1), total)))]
    if as_json:
        click.echo(json.dumps([one.to_json() for one in views], indent=1))
    else:
        _echo(render(one, full=full, colour=_colour()) for one in views)


@show.command(short_help="What a step saw, or will see.")
@click.argument("target", metavar="LOCK")
@click.argument("number", type=int, metavar="STEP")
@step_options
@click.option("--rank", type=click.IntRange(0), help="With --world: only rows of this rank.")
@click.option("--micro-batch", type=click.IntRange(0), help="With --rank: only this one, from 0.")
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
    from olm_data.mixture.lock import Lock
    from olm_data.show.render_steps import step_lines
    from olm_data.show.steps import show_step

    _require("rank", rank, world=steps.world)
    _require("micro-batch", micro_batch, rank=rank)
    if micro_batch is not None and steps.run is None and steps.micro_batch_size is None:
        raise UsageError(
            "--micro-batch needs the size of one",
            fix="add --run RUN, or --micro-batch-size TOKENS (train_module.rank_microbatch_size)",
        )
    batches = _batches(Lock.read(target), steps)
    if batches is None:
        raise _no_size("show step")
    view = show_step(batches, number, rank=rank, microbatch=micro_batch, most=first)
    if as_json:
        click.echo(json.dumps(view.to_json(), indent=1))
        return
    for line in step_lines(batches, view, full=full, colour=_colour()):
        click.echo(line, color=_colour())


def _documents(
    target: str, query: Query, source: str | None, steps: StepOptions, as_json: bool
) -> int:
    """Print documents of a dataset, or of a lock with where they are seen; return how many."""
    from olm_data.dataset.dataset import Dataset
    from olm_data.mixture.lock import Lock
    from olm_data.show.documents import show_documents, show_sightings
    from olm_data.show.render import render
    from olm_data.show.render_steps import document_lines
    from olm_data.target import dataset_root, is_lock

    views: Sequence[Any]
    text = query.text or ""
    if is_lock(target):
        lock = Lock.read(target)
        batches = _batches(lock, steps)
        with show_progress("search") as progress:
            watch = _watch(progress)
            views = show_sightings(lock, query, batches, source=source, watch=watch)
        lines = (
            "\n".join(document_lines(one, colour=_colour(), text=text, full=query.full))
            for one in views
        )
    else:
        names = (field.name for field in fields(StepOptions))
        refuse_given(("source", *names), "a mixture, and this is a dataset")
        dataset = Dataset.open(dataset_root(target))
        with show_progress("search") as progress:
            views = show_documents(dataset, query, watch=_watch(progress))
        lines = (render(one, full=query.full, colour=_colour(), found=text) for one in views)
    if as_json:
        click.echo(json.dumps([one.to_json() for one in views], indent=1))
    else:
        _echo(lines)
    return len(views)


def _batches(lock: Lock, options: StepOptions) -> Batches | None:
    """Return the steps of the run, or of the sizes given; None where there are neither."""
    from olm_data.order.steps import StepSizes
    from olm_data.show.steps import Batches

    _require("micro-batch-size", options.micro_batch_size, world=options.world)
    if options.run is not None:
        refuse_given(("global_batch", "skip"), "steps without --run, which has its own")
        run = _read_run(options.run)
        sizes, skip = run.batch_sizes, list(run.skip())
        microbatch = options.micro_batch_size or run.microbatch_size
    elif options.global_batch is not None:
        run, sizes = None, StepSizes.constant(options.global_batch)
        skip, microbatch = [_range(text) for text in options.skip], options.micro_batch_size
    elif options.skip or options.world:
        raise _no_size("--skip" if options.skip else "--world")
    else:
        return None
    return Batches(
        lock,
        batch_sizes=sizes,
        world_size=options.world,
        microbatch_size=microbatch,
        skip=skip,
        run=run,
    )


def _no_size(where: str) -> UsageError:
    return UsageError(
        "the size of a step is not known",
        where=where,
        fix="add --run RUN, or --global-batch TOKENS (data_loader.global_batch_size)",
    )


def _require(name: str, value: int | None, **needed: int | None) -> None:
    """Refuse an option that has no effect without another.

    Raises:
        UsageError: it is given and the other is not.
    """
    ((other, there),) = needed.items()
    if value is not None and there is None:
        raise UsageError(f"--{name} needs --{other}", fix=f"add --{other} N")


def _read_run(folder: str) -> Run:
    """Read a run folder; say what of its log is left out."""
    from olm_data.run_log.run import Run

    run = Run.read(folder)
    for remark in run.notes:
        warn(remark)
    return run


def _range(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal()):
        raise UsageError(
            f"{text!r} is not a range of rows",
            where="--skip",
            fix="write FIRST:END, for example --skip 4096:8192",
        )
    return int(first), int(end)


def _watch(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress.update(done / total, f"{done:,} documents")


def _echo(shown: Iterator[str]) -> None:
    """Print views, an empty line between them."""
    for number, text in enumerate(shown):
        click.echo("\n" * bool(number) + text, color=_colour())


def _colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
