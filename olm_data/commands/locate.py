"""`olm-data locate`: options and what is printed."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from olm_data.commands.said import show_progress, warn
from olm_data.errors import UsageError

if TYPE_CHECKING:
    from olm_data.locate.locate import Batches
    from olm_data.mixture.lock import Lock
    from olm_data.run_log.run import Run

ONE_OF = ("step", "doc", "address", "text", "verify_log")
OF_STEPS = ("run", "global_batch", "skip", "world", "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options, None or () where they are not given."""

    step: int | None
    doc: str | None
    address: str | None
    text: str | None
    verify_log: str | None
    run: str | None
    global_batch: int | None
    skip: tuple[str, ...]
    rank: int | None
    world: int | None
    micro_batch: int | None
    micro_batch_size: int | None
    source: str | None
    first: int | None

    def given(self) -> list[str]:
        """Return the names of those that are given."""
        return [name for name, value in vars(self).items() if value not in (None, ())]


@click.command()
@click.argument("target", metavar="LOCK")
@click.option("--step", type=int, help="Number of a step, from 1, as in the run's log.")
@click.option("--doc", help="Id of a document in its source.")
@click.option("--address", help="A document as SOURCE:NUMBER or SOURCE:SHARD:NUMBER; no search.")
@click.option("--text", help="Text that a document holds, exactly as it is.")
@click.option("--verify-log", metavar="RUN", help="Check the log of a run folder.")
@click.option(
    "--run", metavar="RUN", help="Run to take batch sizes, skipped rows and the current step from."
)
@click.option("--global-batch", type=click.IntRange(1), help="Tokens of a step, without --run.")
@click.option("--skip", multiple=True, metavar="A:B", help="Rows left out, without --run.")
@click.option("--rank", type=click.IntRange(0), help="With --step: only rows of this rank.")
@click.option("--world", type=click.IntRange(1), help="Ranks of the run.")
@click.option("--micro-batch", type=click.IntRange(0), help="With --rank: only this one, from 0.")
@click.option(
    "--micro-batch-size", type=click.IntRange(1), help="Tokens of a micro-batch, without --run."
)
@click.option("--of", "source", help="With --doc, --text: search only this source.")
@click.option("--first", type=click.IntRange(1), help="Most rows, or documents of each source.")
@click.option("--full", is_flag=True, help="Show all of the text and all rows.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def locate(target: str, as_json: bool, full: bool, **options: Any) -> None:
    """Show what a step saw, or every step that sees a document; check a run's log.

    \b
    olm-data locate manifest.lock.json --step 120 --run runs/small
    olm-data locate manifest.lock.json --step 120 --global-batch 65536 --world 8 --rank 3
    olm-data locate manifest.lock.json --doc page-17 --run runs/small
    olm-data locate manifest.lock.json --text "white whale"
    olm-data locate manifest.lock.json --verify-log runs/small

    Needs no index: the order is a function, and so is its inverse.
    """
    asked = Asked(**options)
    _refuse_mixed(asked.given())
    from olm_data.mixture.lock import Lock

    lock = Lock.read(target)
    if asked.verify_log is not None:
        _verify_log(lock, asked.verify_log, as_json)
    elif asked.step is not None:
        _step(lock, asked, asked.step, full=full, as_json=as_json)
    else:
        _documents(lock, asked, full=full, as_json=as_json)


def _refuse_mixed(asked: list[str]) -> None:
    """Refuse options that have no effect together.

    Raises:
        UsageError: which.
    """

    def option(name: str) -> str:
        return "--of" if name == "source" else "--" + name.replace("_", "-")

    wanted = [name for name in ONE_OF if name in asked]
    if len(wanted) != 1:
        names = " and ".join(option(name) for name in wanted)
        raise UsageError(
            f"{names} do not go together" if wanted else "nothing to locate is given",
            fix="give one of --step, --doc, --address, --text, --verify-log",
        )
    allowed: dict[str, tuple[str, ...]] = {
        "step": (*OF_STEPS, "rank", "micro_batch", "first"),
        "doc": (*OF_STEPS, "source", "first"),
        "address": OF_STEPS,
        "text": (*OF_STEPS, "source", "first"),
        "verify_log": (),
    }
    useless = [name for name in asked if name not in (*allowed[wanted[0]], wanted[0])]
    if useless:
        raise UsageError(
            f"{option(useless[0])} has no effect with {option(wanted[0])}", fix="leave it out"
        )
    if "run" in asked:
        for name in ("global_batch", "skip"):
            if name in asked:
                raise UsageError(f"{option(name)} comes from the run", fix="leave one of them out")
    elif "global_batch" not in asked:
        needs = [name for name in OF_STEPS if name in asked]
        if wanted[0] == "step" or needs:
            raise UsageError(
                "the size of a step is not known",
                where=option(needs[0]) if needs else "--step",
                fix="add --run RUN, or --global-batch TOKENS (data_loader.global_batch_size)",
            )
    for name, other in (("rank", "world"), ("micro_batch", "rank"), ("micro_batch_size", "world")):
        if name in asked and other not in asked:
            raise UsageError(f"{option(name)} needs {option(other)}", fix=f"add {option(other)} N")
    if "micro_batch" in asked and not {"run", "micro_batch_size"} & set(asked):
        raise UsageError(
            "--micro-batch needs the size of one",
            fix="add --run RUN, or --micro-batch-size TOKENS (train_module.rank_microbatch_size)",
        )


def _batches(lock: Lock, asked: Asked) -> Batches | None:
    """Return the steps of the run, or of the sizes given; None where there are neither."""
    from olm_data.locate.locate import Batches
    from olm_data.order.steps import StepSizes

    run = _read_run(asked.run) if asked.run is not None else None
    if run is not None:
        sizes = run.batch_sizes
    elif asked.global_batch is not None:
        sizes = StepSizes.constant(asked.global_batch)
    else:
        return None
    microbatch = asked.micro_batch_size or (run.microbatch_size if run else None)
    return Batches(
        lock,
        batch_sizes=sizes,
        world_size=asked.world,
        microbatch_size=microbatch,
        skip=run.skip() if run else [_range(text) for text in asked.skip],
        run=run,
    )


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


def _verify_log(lock: Lock, folder: str, as_json: bool) -> None:
    from olm_data.locate.render import log_lines
    from olm_data.locate.verify_log import verify_log

    run = _read_run(folder)
    with show_progress("verify-log") as progress:
        report = verify_log(
            lock,
            run,
            watch=lambda done, total: progress.update(done / total, f"{done:,} steps"),
        )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        click.echo("\n".join(log_lines(report)))


def _step(lock: Lock, asked: Asked, step: int, *, full: bool, as_json: bool) -> None:
    from olm_data.locate.locate import locate_step
    from olm_data.locate.render import step_lines

    batches = _batches(lock, asked)
    assert batches is not None
    view = locate_step(
        batches,
        step,
        rank=asked.rank,
        microbatch=asked.micro_batch,
        most=asked.first,
    )
    if as_json:
        click.echo(json.dumps(view.to_json(), indent=1))
        return
    colour = _colour()
    for line in step_lines(batches, view, full=full, colour=colour):
        click.echo(line, color=colour)


def _documents(lock: Lock, asked: Asked, *, full: bool, as_json: bool) -> None:
    from olm_data.locate.locate import locate_documents
    from olm_data.locate.render import document_lines

    if asked.text == "":
        raise UsageError("nothing to search for", where="--text")
    with show_progress("search") as progress:
        found = locate_documents(
            lock,
            _batches(lock, asked),
            identifier=asked.doc,
            address=asked.address,
            text=asked.text,
            source=asked.source,
            most=asked.first,
            watch=lambda done, total: progress.update(done / total, f"{done:,} documents"),
        )
    if as_json:
        click.echo(json.dumps([document.to_json() for document in found], indent=1))
        return
    colour = _colour()
    for number, document in enumerate(found):
        lines = document_lines(document, colour=colour, text=asked.text or "", every=full)
        click.echo("\n" * bool(number) + "\n".join(lines), color=colour)


def _colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
