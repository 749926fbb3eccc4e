"""`olm-data tokenize`: text becomes a dataset, once, whatever interrupts it.

    source + tokenizer -> plan -> plan.json (first) -> tokenizer.json, job.json
                       -> tasks on a runner, heartbeats in run/ -> accounts checked
                       -> manifest of the validation split -> manifest.json (last, conditional)

Everything that decides bytes is in the plan. A run that finds a plan.json of the same digest goes
on where the earlier one stopped; one that finds another plan refuses and names the difference.
Never: a record without an account, a manifest over the budget of bad records, a clock time in a
digested byte.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from olm_data.bounded_json import MalformedJson
from olm_data.counts import duration
from olm_data.dataset.account import InputAccount, check_accounts, totals_by_input, unpack
from olm_data.dataset.folder import refuse_dataset_folder
from olm_data.dataset.manifest import EXCLUDED, MANIFEST, PLAN, VALIDATION, Manifest, read_manifest
from olm_data.dataset.plan import TEXT_BYTES_PER_TOKEN, Plan
from olm_data.encoders import ParityReport, choose_encoder, known_encoder, likely_encoder
from olm_data.errors import (
    ConflictError,
    ResourceError,
    ValidationError,
    printable,
)
from olm_data.progress import Progress
from olm_data.runners.base import Count, Runner
from olm_data.runners.heartbeat import PARENT, RUN, Heartbeat, forget_ended
from olm_data.select.selection import IdSet
from olm_data.sources import read_units
from olm_data.sources.base import DocumentBatch
from olm_data.sources.passed import passed_json, passed_lines, tally
from olm_data.storage.exclusive import exclusive
from olm_data.storage.lease import Lease
from olm_data.storage.store import Store, absolute
from olm_data.threads import in_order
from olm_data.tokenization.budget import BudgetWatch, check_budget, check_valid
from olm_data.tokenization.committed import TaskResult, finished_tasks
from olm_data.tokenization.dedup import FindDuplicates, found_before, write_drops
from olm_data.tokenization.dedup import clear as clear_duplicates
from olm_data.tokenization.job import TokenizeJob
from olm_data.tokenization.publish import publish
from olm_data.tokenization.request import Request, refuse_identical
from olm_data.tokenization.run_progress import RunProgress
from olm_data.tokenization.stored_job import write_job


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run made.

    Attributes:
        output: where the dataset is.
        manifest, validation: the manifests; validation is None where nothing was held out.
        already_complete: the dataset was there before the run.
        proof: the encoder used and what is proved of it; None where nothing was encoded.
        special_hits: strings in the text that spell a special token.
        seconds: wall time of the tasks.
        documents_now, text_bytes_now, tokens_now: done by this run, shards found done not counted.
        by_reference: documents encoded by `hf` in this run, as nothing is proved of the encoder
            for them.
        kept_shards: tasks that an earlier run had finished.
        inputs: what became of the records of each input, by its path; empty where
            `already_complete`.
        ids_found: how many of the ids of `--exclude-ids` some record had; None if not asked.
    """

    output: str
    manifest: Manifest
    validation: Manifest | None
    already_complete: bool
    proof: ParityReport | None
    special_hits: int
    seconds: float
    documents_now: int
    text_bytes_now: int
    tokens_now: int
    by_reference: int
    kept_shards: int
    inputs: dict[str, InputAccount]
    ids_found: int | None = None


def tokenize(request: Request, *, runner: Runner, progress: Progress) -> Summary:
    """Write the dataset of `request` to its output, or finish writing it.

    Args:
        runner: where the tasks run.
        progress: shows how far it is.

    Raises:
        ConflictError: another process writes there, or another dataset is there.
        InputError: an input is refused, changed while it was read, or has too many bad records.
        ResourceError: no room, no permission, or workers that die.
        StorageError: remote storage failed.
    """
    plan, output, recipe = request.plan(), request.output, request.recipe
    progress.event("start", **_start(request, plan, output))
    for line in passed_lines(tally(request.source.passed)):
        progress.note(f"not read: {line}")
    store = Store(output, single_writer=recipe.single_writer)
    refuse_dataset_folder(store)
    with ExitStack() as held:
        lease = held.enter_context(exclusive(store, note=progress.note))
        found = _existing(store, plan)
        splits = [store] if plan.settings.holdout_below == 0 else [store, store.child(VALIDATION)]
        for split in splits[1:]:
            held.enter_context(exclusive(split, probe=False))
        if found is not None:
            validation = read_manifest(splits[1]) if len(splits) == 2 else None
            forget_duplicates(request, store)
            return already_complete(output, found, validation, len(plan.tasks))
        if not recipe.allow_duplicates:
            refuse_identical(request.source)
        made = make_shards(
            request, plan, PLAN, splits, runner=runner, progress=progress, lease=lease
        )
        lease.check()
        manifests = publish(request, plan, splits, made.results, made.accounts, made.proof.encoder)
        forget_duplicates(request, store)
    return summarise(output, manifests, made)


@dataclass(frozen=True, kw_only=True)
class Made:
    """The finished shards of a plan.

    Attributes:
        results: one a task, in order.
        accounts: one for each input of each task, in order.
        proof: the encoder used and what is proved of it.
        counts: int64[tasks, len(Count)], of the tasks this run did.
        seconds: wall time of the tasks.
        kept: tasks that an earlier run had finished.
        inputs: what became of the records of each input, by its path.
        ids_found: as in `Summary`.
    """

    results: Sequence[TaskResult]
    accounts: Sequence[InputAccount]
    proof: ParityReport
    counts: np.ndarray
    seconds: float
    kept: int
    inputs: dict[str, InputAccount]
    ids_found: int | None


def make_shards(
    request: Request,
    plan: Plan,
    plan_name: str,
    splits: Sequence[Store],
    *,
    runner: Runner,
    progress: Progress,
    lease: Lease,
    before: Sequence[Manifest] = (),
) -> Made:
    """Write the shards of a plan that are not there yet; see `tokenize` for arguments and errors.

    Args:
        plan_name: the plan is stored under this name before any shard is written.
        splits: stores of the training split and, where documents are held out, of validation.
        lease: of the output; work ends where it is lost.
        before: manifests of the splits of a dataset that the shards are added to.
    """
    store, total, recipe = splits[0], len(plan.tasks), request.recipe
    encoder, budget = recipe.encoder, recipe.budget
    known = known_encoder(
        encoder,
        request.tokenizer,
        recipe.special,
        plan.all_text_bytes,
    )
    job = TokenizeJob(
        plan=plan,
        inputs=request.inputs,
        read=request.source.options,
        tokenizer=request.tokenizer,
        encoder=known.encoder if known else likely_encoder(encoder),
        routed=known.routed if known else (),
        output=absolute(store.root),
        single_writer=store.single_writer,
    )
    results = finished_tasks(plan, splits)
    kept = len(results)
    search = request.recipe.dedup and kept < total and not found_before(store, plan)
    with runner.ready(FindDuplicates.before(job) if search else job, total - kept, total):
        proof = known or _choose_encoder(request, plan, encoder)
        if proof.note:
            progress.note(proof.note)
        _check_room(store, plan, request.tokenizer.dtype.itemsize)
        if not store.exists(plan_name):
            store.create(plan_name, plan.encode())
        excluded = request.source.excluded
        if excluded is not None:
            store.put(EXCLUDED, excluded.to_npy())
        job = replace(job, encoder=proof.encoder, routed=proof.routed)
        if kept:
            progress.note(f"{kept} of {total} shards were finished before; they are kept")
        guard = _Guard(lease, BudgetWatch(plan, job.inputs, job.read, budget, results))
        lease.check()
        forget_ended(store)
        with Heartbeat(store, PARENT, note=progress.note, check=lease.check) as heartbeat:
            shown = heartbeat.around(runner)
            if search:
                finding = FindDuplicates.before(job)
                write_job(finding, plan_name)
                _find_duplicates(finding, shown, progress, guard, before)
            write_job(job, plan_name)
            counts, seconds = _run(job, plan, shown, results, progress, guard)
        lease.check()
        store.child(RUN).clear()
    ordered = [results[task] for task in range(len(plan.tasks))]
    accounts = [account for result in ordered for account in result.train[0].accounts]
    _check_accounts(plan, ordered)
    check_budget(accounts, plan, budget, store.root)
    if job.read.on_invalid == "error":
        check_valid(accounts, plan)
    return Made(
        results=ordered,
        accounts=accounts,
        proof=proof,
        counts=counts,
        seconds=seconds,
        kept=kept,
        inputs={
            plan.inputs[index].path: account for index, account in totals_by_input(accounts).items()
        },
        ids_found=_ids_found(request.source.excluded, accounts),
    )


class _Guard(NamedTuple):
    """What ends work that is under way: a lost lease, too many bad records."""

    lease: Lease
    budget: BudgetWatch

    def check(self, counts: np.ndarray, share: float) -> None:
        if self.lease.lost is not None:
            raise self.lease.lost
        self.budget.check(counts, share)


def forget_duplicates(request: Request, store: Store) -> None:
    """Remove what the search for duplicates left, once its dataset is published."""
    if request.recipe.dedup:
        clear_duplicates(store)


def _find_duplicates(
    job: FindDuplicates,
    runner: Runner,
    progress: Progress,
    guard: _Guard,
    before: Sequence[Manifest],
) -> None:
    """Run the pass that finds duplicates, and store which documents each task drops."""
    store, tasks = job.splits[0], range(len(job.plan.tasks))
    there = dict(zip(tasks, in_order(job.finished, tasks), strict=True))
    found: dict[int, Any] = {task: count for task, count in there.items() if count is not None}
    progress.note("looking for exact duplicates: a first pass reads the text")
    _, seconds = _run(job, job.plan, runner, found, progress, guard)
    shards = [
        (split, shard)
        for split, manifest in zip(job.splits, before, strict=False)
        for shard in manifest.shards
    ]
    documents = sum(manifest.totals.documents for manifest in before)
    counts = [found[task] for task in tasks]
    dropped = write_drops(store, job.plan, counts, shards, documents)
    progress.note(
        f"{dropped:,} of {sum(counts):,} documents repeat an earlier one and will be dropped "
        f"(found in {duration(seconds)})"
    )


def summarise(output: str, manifests: Sequence[Manifest], made: Made) -> Summary:
    """Return the summary of a run that published `manifests`: train, then validation if any."""
    return Summary(
        output=output,
        manifest=manifests[0],
        validation=manifests[1] if len(manifests) == 2 else None,
        already_complete=False,
        proof=made.proof,
        special_hits=sum(account.special_hits for account in made.accounts),
        seconds=made.seconds,
        documents_now=int(made.counts[:, Count.DOCUMENTS].sum()),
        text_bytes_now=int(made.counts[:, Count.TEXT_BYTES].sum()),
        tokens_now=int(made.counts[:, Count.TOKENS].sum()),
        by_reference=int(made.counts[:, Count.BY_REFERENCE].sum()),
        kept_shards=made.kept,
        inputs=made.inputs,
        ids_found=made.ids_found,
    )


def _ids_found(excluded: IdSet | None, accounts: Sequence[InputAccount]) -> int | None:
    if excluded is None:
        return None
    found = np.zeros(len(excluded), bool)
    for account in accounts:
        found |= unpack(account.excluded, len(found))
    return int(found.sum())


def _start(request: Request, plan: Plan, output: str) -> dict[str, Any]:
    """What the `start` event says."""
    inputs = request.source.inputs
    return {
        "output": output,
        "plan": plan.digest,
        "tokenizer": request.tokenizer.name,
        "inputs": len(inputs),
        "input_bytes": sum(item.bytes for item in inputs),
        "passed_over": passed_json(tally(request.source.passed)),
        "text_bytes": plan.all_text_bytes,
        "shards": len(plan.tasks),
    }


def already_complete(
    output: str, manifest: Manifest, validation: Manifest | None, tasks: int
) -> Summary:
    """Return the summary of a run that found everything done."""
    return Summary(
        output=output,
        manifest=manifest,
        validation=validation,
        already_complete=True,
        proof=None,
        special_hits=0,
        seconds=0.0,
        documents_now=0,
        text_bytes_now=0,
        tokens_now=0,
        by_reference=0,
        kept_shards=tasks,
        inputs={},
    )


def _existing(store: Store, plan: Plan) -> Manifest | None:
    """Return the manifest if the very dataset is there; None if it is to be written or finished."""
    complete = store.exists(MANIFEST)
    try:
        differences = plan.differences(Plan.read(store, PLAN))
    except FileNotFoundError:
        if not complete:
            return None
        differences = [] if read_manifest(store).plan == plan.digest else ["its plan.json is gone"]
    except MalformedJson as error:
        raise ValidationError(
            "the plan of an earlier run is damaged",
            where=store.url(PLAN),
            fix="delete this output, or choose another --output",
        ) from error
    if differences:
        shown = [printable(text) for text in differences[:10]]
        if len(differences) > 10:
            shown.append(f"and {len(differences) - 10} more")
        state = "holds another dataset" if complete else "holds the beginning of another dataset"
        raise ConflictError(
            f"the output {state}",
            where=store.root,
            why="it was made from other inputs or options:\n    " + "\n    ".join(shown),
            fix="choose another --output, or delete this one and run the command again",
        )
    return read_manifest(store) if complete else None


def first_documents(request: Request, plan: Plan) -> DocumentBatch | None:
    """Return the first documents of the input, some megabytes of them; None if there are none."""
    source = request.source
    for batch in read_units(request.inputs, plan.units, source.options, source.excluded):
        if batch.documents:
            return batch
    return None


def _choose_encoder(request: Request, plan: Plan, encoder: str) -> ParityReport:
    """Choose the encoder, proved on the first documents of the input."""
    first = first_documents(request, plan)
    data = np.zeros(0, np.uint8) if first is None else first.data
    offsets = np.zeros(1, np.int64) if first is None else first.offsets
    return choose_encoder(encoder, request.tokenizer, request.recipe.special, (data, offsets))


def _check_room(store: Store, plan: Plan, itemsize: int) -> None:
    """Refuse before work when the disk is plainly too small: half of what is likely needed."""
    if store.remote:
        return
    text = plan.all_text_bytes
    needed = text // TEXT_BYTES_PER_TOKEN * itemsize
    free = shutil.disk_usage(store.root).free
    if free < needed // 2:
        raise ResourceError(
            f"not enough room: about {needed:,} bytes needed, {free:,} free",
            where=store.root,
            fix="make room, or choose another --output",
        )


def _run(
    job: TokenizeJob | FindDuplicates,
    plan: Plan,
    runner: Runner,
    results: dict[int, Any],
    progress: Progress,
    guard: _Guard,
) -> tuple[np.ndarray, float]:
    """Run the unfinished tasks; add to `results`. Returns the counts and the seconds it took."""
    sizes = [plan.text_bytes(task) for task in range(len(plan.tasks))]
    todo = [task for task in range(len(plan.tasks)) if task not in results]
    shown = RunProgress(progress, sizes, todo)

    def done(task: int, result: Any) -> None:
        results[task] = result
        shown.done(task)

    def watch(counts: np.ndarray, running: Sequence[int]) -> None:
        shown.watch(counts, running)
        guard.check(counts, shown.share)

    with progress:
        if todo:
            runner.run(job, todo, len(plan.tasks), done=done, watch=watch, note=progress.note)
        return shown.counts, progress.seconds


def _check_accounts(plan: Plan, results: Sequence[TaskResult]) -> None:
    """Check that each task's shards and accounts add up, and read what the plan says."""
    for task, result in enumerate(results):
        train = result.train[0]
        check_accounts(
            plan.describe(task),
            plan.units_of(task),
            train.accounts,
            documents=train.documents,
            held_out=0 if result.validation is None else result.validation[0].documents,
            dropped=train.dropped,
        )
