"""The shards of a plan: every task that is not done is run, and what all wrote is checked.

plan -> encoder proved, room on the disk -> plan.json, job.json
     -> (--dedup: a first pass finds what to drop) -> tasks on a runner, heartbeats in run/
     -> accounts checked -> FinishedShards
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from olm_data.counts import counted, duration, scaled
from olm_data.dataset.account import InputAccount, check_accounts
from olm_data.dataset.manifest import EVAL_TEXTS, EXCLUDED, MAX_IDS
from olm_data.dataset.plan import TEXT_BYTES_PER_TOKEN, Plan, Version
from olm_data.errors import ResourceError
from olm_data.progress import Progress, RateWindow, forecast
from olm_data.runners.base import Count, Runner
from olm_data.runners.heartbeat import PARENT, RUN, Heartbeat, forget_ended
from olm_data.storage.lease import Lease
from olm_data.storage.store import Store, create_json
from olm_data.threads import in_order
from olm_data.tokenization.budget import BudgetWatch, check_budget, check_valid
from olm_data.tokenization.decontaminate import MAX_BYTES
from olm_data.tokenization.dedup import drops_found, write_drops
from olm_data.tokenization.job import FindDuplicates, TokenizeJob
from olm_data.tokenization.request import Request
from olm_data.tokenization.stored_job import write_job
from olm_data.tokenization.task_results import TaskResult, finished_tasks

Check = Callable[[np.ndarray, float], None]
"""`check(counts, share)`: raises what ends work that is under way."""

Pass = Callable[[TokenizeJob | FindDuplicates, dict[int, Any]], tuple[np.ndarray, float]]
"""`run(job, results)`: see `_run`."""


@dataclass(frozen=True, kw_only=True)
class FinishedShards:
    """The shards of all tasks of a plan.

    Attributes:
        results: one a task, in order.
        accounts: one for each input of each task, in order.
        counts: int64 [len(Count)], of the tasks this run did.
        seconds: wall time of the tasks.
        kept: tasks that an earlier run had finished.
    """

    results: Sequence[TaskResult]
    accounts: Sequence[InputAccount]
    counts: np.ndarray
    seconds: float
    kept: int


def workers_ready(job: TokenizeJob, runner: Runner, *, dedup: bool) -> AbstractContextManager[None]:
    """Get workers ready for the tasks of a plan. A process that holds a lease has a second thread,
    so they are forked before.

    Args:
        dedup: a pass that finds duplicates comes first, where none has been made.
    """
    first = _search_before(job) if dedup else None
    return runner.ready(first or job, len(job.plan.tasks), len(job.plan.tasks))


def write_shards(
    request: Request,
    job: TokenizeJob,
    splits: Sequence[Store],
    versions: Sequence[Version] = (),
    *,
    runner: Runner,
    progress: Progress,
    lease: Lease,
) -> FinishedShards:
    """Write the shards of a plan that are not there yet; see `tokenize` for arguments and errors.

    Args:
        job: writes them.
        splits: stores of the training split and, where documents are held out, of validation.
        versions: of the splits of a dataset that the shards are added to.
        lease: of the output; work ends where it is lost.
    """
    store, plan, recipe = splits[0], request.plan, request.recipe
    total, results = len(plan.tasks), finished_tasks(plan, splits)
    kept = len(results)
    finding = _search_before(job) if recipe.dedup and kept < total else None
    _check_room(store, plan, request.tokenizer.dtype.itemsize)
    if not store.exists(request.plan_name):
        create_json(store, request.plan_name, plan.encode())
    if request.source.excluded is not None:
        store.put(EXCLUDED, request.source.excluded.to_npy(), limit=MAX_IDS)
    if request.evaluated is not None:
        store.put(EVAL_TEXTS, request.evaluated.data, limit=MAX_BYTES)
    if kept:
        progress.note(f"{kept} of {total} shards were finished before; they are kept")
    budget = BudgetWatch(plan, job.inputs, job.read, recipe.budget, results)

    def check(counts: np.ndarray, share: float) -> None:
        if lease.lost is not None:
            raise lease.lost
        budget.check(counts, share)

    lease.check()
    forget_ended(store)
    with Heartbeat(store, PARENT, note=progress.note, check=lease.check) as heartbeat:
        run = partial(_run, request.plan_name, runner, heartbeat, progress, check)
        if finding is not None:
            _find_duplicates(finding, run, progress, versions)
        counts, seconds = run(job, results)
    lease.check()
    store.child(RUN).clear()
    ordered = [results[task] for task in range(total)]
    _check_accounts(plan, ordered)
    accounts = [account for result in ordered for account in result.accounts]
    check_budget(accounts, plan, recipe.budget, store.root)
    if job.read.on_invalid == "error":
        check_valid(accounts, plan)
    return FinishedShards(
        results=ordered,
        accounts=accounts,
        counts=counts.sum(axis=0),
        seconds=seconds,
        kept=kept,
    )


def _search_before(job: TokenizeJob) -> FindDuplicates | None:
    """Return the pass that finds duplicates; None where one has been made."""
    return None if drops_found(job.splits[0], job.plan) else FindDuplicates.before(job)


def _check_accounts(plan: Plan, results: Sequence[TaskResult]) -> None:
    for task, result in enumerate(results):
        (train, _), *validation = result.splits
        check_accounts(
            plan.describe(task),
            plan.units_of(task),
            train.accounts,
            documents=train.documents,
            held_out=sum(record.documents for record, _ in validation),
            dropped=train.dropped,
        )


def _check_room(store: Store, plan: Plan, itemsize: int) -> None:
    """Refuse before work when the disk is plainly too small: half of what is likely needed."""
    if store.remote:
        return
    needed = plan.all_text_bytes // TEXT_BYTES_PER_TOKEN * itemsize
    free = shutil.disk_usage(store.root).free
    if free < needed // 2:
        raise ResourceError(
            f"not enough room: about {needed:,} bytes needed, {free:,} free",
            where=store.root,
            fix="make room, or choose another --output",
        )


def _find_duplicates(
    job: FindDuplicates, run: Pass, progress: Progress, versions: Sequence[Version]
) -> None:
    """Run the pass that finds duplicates, and store which documents each task drops."""
    tasks = range(len(job.plan.tasks))
    there = zip(tasks, in_order(job.finished, tasks), strict=True)
    found: dict[int, int] = {task: count for task, count in there if count is not None}
    bands, _ = job.plan.settings.minhash or (1, 0)
    kind = "near-" if job.plan.settings.minhash else "exact "
    progress.note(f"looking for {kind}duplicates: a first pass reads the text")
    _, seconds = run(job, found)
    shards = [(version.store, shard) for version in versions for shard in version.manifest.shards]
    documents = sum(version.manifest.totals.documents for version in versions)
    counts = [found[task] for task in tasks]
    dropped = write_drops(job.splits[0], job.plan, counts, shards, documents, bands)
    progress.note(
        f"{dropped:,} of {sum(counts):,} documents repeat an earlier one and will be dropped "
        f"(found in {duration(seconds)})"
    )


def _run(
    plan_name: str,
    runner: Runner,
    heartbeat: Heartbeat,
    progress: Progress,
    check: Check,
    job: TokenizeJob | FindDuplicates,
    results: dict[int, Any],
) -> tuple[np.ndarray, float]:
    """Run the unfinished tasks; add to `results`. Returns the counts and the seconds it took."""
    write_job(job, plan_name)
    tasks = range(len(job.plan.tasks))
    todo = [task for task in tasks if task not in results]
    shown = RunProgress(progress, [job.plan.text_bytes(task) for task in tasks], todo)

    def done(task: int, result: Any) -> None:
        heartbeat.saw_done(task)
        results[task] = result
        shown.done(task)

    def watch(counts: np.ndarray, running: Sequence[int]) -> None:
        heartbeat.saw(counts, running)
        shown.watch(counts, running)
        check(counts, shown.share)

    with progress:
        if todo:
            runner.run(job, todo, len(tasks), done=done, watch=watch, note=progress.note)
        return shown.counts, progress.seconds


STALL_SECONDS = 15.0
STAGES = {"read": Count.READ_US, "encode": Count.ENCODE_US, "write": Count.WRITE_US}


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has done so far: keys of the event `progress`.

    Attributes:
        dropped, bad: records dropped, and of these the ones that count against `--max-bad`.
        stages: share of each stage in the time all were at work; {} before any was.
        workers: tasks at work.
    """

    documents: int
    text_bytes: int
    tokens: int
    dropped: int
    bad: int
    text_bytes_per_second: int
    tokens_per_second: int
    stages: dict[str, float]
    workers: int
    shards: int
    shards_done: int


class RunProgress:
    """Follows one `Runner.run`.

    Args:
        progress: where to show it; entered by the caller.
        planned: int64 [tasks], guessed bytes of text of each task.
        todo: the tasks to run; the others are done already and count for nothing here.
    """

    def __init__(self, progress: Progress, planned: Sequence[int], todo: Sequence[int]) -> None:
        self._progress, self._todo = progress, np.asarray(todo, np.int64)
        self._planned = np.asarray(planned, np.int64)
        self._finished = np.zeros(len(self._planned), bool)
        self._bytes, self._tokens = RateWindow(), RateWindow()
        self.counts = np.zeros((len(self._planned), len(Count)), np.int64)
        self.share = 0.0  # of the work of `todo` that is done

    def done(self, task: int) -> None:
        """Note that a task is finished."""
        self._finished[task] = True

    def watch(self, counts: np.ndarray, running: Sequence[int]) -> None:
        """Show the counts. See `runners.base.Watch`."""
        self.counts[:] = counts
        sums, now = counts.sum(axis=0), self._progress.seconds
        self._bytes.add(now, int(sums[Count.TEXT_BYTES]))
        self._tokens.add(now, int(sums[Count.TOKENS]))
        todo = self._todo
        done, left = forecast(
            self._planned[todo], self._finished[todo], counts[todo, Count.TEXT_BYTES]
        )
        speed = self._bytes.rate
        in_bytes = bool(sums[Count.TEXT_BYTES])
        facts = self._facts(sums, speed, len(running))
        self.share = done / max(done + left, 1.0)
        self._progress.update(
            self.share,
            in_words(facts, still=self._bytes.still),
            left=left / speed if speed and in_bytes else None,
            facts=facts,
        )

    def _facts(self, sums: np.ndarray, speed: float, workers: int) -> RunFacts:
        return RunFacts(
            documents=int(sums[Count.DOCUMENTS]),
            text_bytes=int(sums[Count.TEXT_BYTES]),
            tokens=int(sums[Count.TOKENS]),
            dropped=int(sums[Count.DROPPED]),
            bad=int(sums[Count.BAD]),
            text_bytes_per_second=round(speed),
            tokens_per_second=round(self._tokens.rate),
            stages=stage_shares(sums),
            workers=workers,
            shards=len(self._todo),
            shards_done=int(self._finished.sum()),
        )


def stage_shares(sums: np.ndarray) -> dict[str, float]:
    """Return the share of each stage in the time all stages were at work; {} before any was.

    Args:
        sums: int64 [len(Count)], counts summed over tasks.
    """
    spent = {name: int(sums[column]) for name, column in STAGES.items()}
    total = sum(spent.values())
    return {name: round(us / total, 4) for name, us in spent.items()} if total else {}


def in_words(facts: RunFacts, *, still: float = 0.0) -> list[str]:
    """Return the facts of a run as pieces of text, the most important first.

    Args:
        still: seconds since text last came through; said when it is long.
    """
    pieces = [
        f"{facts.text_bytes_per_second / 1e6:.1f} MB/s of text",
        f"{scaled(facts.tokens_per_second)} tokens/s",
        f"{counted(facts.documents, 'document')}",
    ]
    if not facts.text_bytes:  # no speed yet, and none to be shown as a slow one
        pieces = ["starting"]
    if still >= STALL_SECONDS:
        pieces.insert(0, f"no text for {duration(still)}")
    if facts.dropped:
        bad = f" ({facts.bad:,} bad)" if facts.bad else ""
        pieces.append(f"{facts.dropped:,} dropped{bad}")
    pieces.append(f"{facts.shards_done:,} of {counted(facts.shards, 'shard')}")
    if facts.stages:
        pieces.append(" ".join(f"{name} {part:.0%}" for name, part in facts.stages.items()))
    pieces.append(counted(facts.workers, "worker"))
    return pieces
