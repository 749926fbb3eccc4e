"""`olm-data verify`: options and what is printed."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from olm_data.command import CountParam
from olm_data.commands.said import note, refuse_given, show_progress, show_read, warn
from olm_data.counts import counted
from olm_data.errors import InputError, UsageError, ValidationError, typed
from olm_data.printing import emit


@click.command()
@click.argument("target", metavar="DIR|LOCK|RUN")
@click.option("--sample", help="A quick look: the share of the blocks to read, 1%; 100% is all.")
@click.option("--seed", type=CountParam(0), help="Which blocks and shards.  [default: 0]")
@click.option("--deep", is_flag=True, help="Also tokenise a sample of the original text again.")
@click.option("--root", help="With --deep: where the inputs are.  [default: where they were]")
@click.option("--trust", is_flag=True, help="With --deep: import a source that it names.")
@click.option("--lock", help="Of a RUN: its lock.  [default: the copy in its newest checkpoint]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    target: str,
    sample: str | None,
    seed: int | None,
    deep: bool,
    lock: str | None,
    as_json: bool,
    **source: Any,
) -> None:
    """Check every byte of a dataset, or of all datasets of a lock, against its digests.

    Of a training run, the folder trainer.save_folder: check that it trained on the rows that its
    lock planned, each step on its own and in their order.

    \b
    olm-data verify ./tokens/books
    olm-data verify s3://bucket/tokens/web --sample 1%        a quick look
    olm-data verify ./tokens/books --deep --root ./books      compare with the text, too
    olm-data verify manifest.lock.json
    olm-data verify runs/olm-1m                               planned against trained
    """
    from olm_data.counts import parse_share
    from olm_data.extensions.verify import datasets as verb
    from olm_data.path_kinds import kind_of, require

    if kind_of(target) == "run":
        refuse_given(("sample", "seed", "deep", "root"), "datasets, and this is a run")
        _verify_training(ctx, target, lock, as_json)
        return
    refuse_given(("lock",), "the folder of a run")
    if not target.endswith(".json"):  # a damaged lock or manifest is what is looked for
        require(target, "dataset", "lock", "run", "folder")
    share = None if sample is None else parse_share(sample, "--sample", allow_one=True)
    if share == 0:
        raise UsageError("a sample of nothing proves nothing", fix="--sample 1%")
    if not deep:
        refuse_given(("root", "trust"), "--deep")
    if not deep and share is None:
        refuse_given(("seed",), "--sample and --deep")
    asked = None
    if deep:
        from olm_data.extensions.verify.deep import DEFAULT_SHARE, Deep

        asked = Deep(share=share or DEFAULT_SHARE, seed=seed or 0, **source)
    with show_progress("verify") as progress:
        watch = partial(show_read, progress)
        report = verb.verify(target, sample=share, seed=seed or 0, deep=asked, watch=watch)
    emit(report, as_json)
    if not report.ok:
        note("next: restore the files named above from a copy, or tokenise again into a new output")
        ctx.exit(ValidationError.exit_code)
    if report.unproved:
        note("next: say --root FOLDER if the text was moved; the dataset itself is sound")
        ctx.exit(InputError.exit_code)
    if report.sample is not None:
        note(f"next: olm-data verify {typed(target)}   reads every byte")
    elif not target.endswith(".json"):
        note(f"next: olm-data stats {typed(target)}")


def _verify_training(ctx: click.Context, folder: str, lock: str | None, as_json: bool) -> None:
    from olm_data.extensions.verify.training import find_lock, read_log, verify_training

    log = read_log(folder)
    for remark in log.notes:
        warn(remark)
    if not log.steps:
        raise InputError(
            "the run has logged no step",
            where=folder,
            fix="train first; trainer.callbacks.metrics_logger writes the log",
        )
    with show_progress("verify") as progress:

        def watch(done: int, total: int) -> None:
            progress.update(done / total, counted(done, "step"))

        found = verify_training(find_lock(log, lock), log, watch=watch)
    emit(found, as_json)
    if not found.agrees:
        note("next: olm-data show row LOCK N   shows what a row holds")
        ctx.exit(ValidationError.exit_code)
