"""`olm-data status`: how far a run is, running, dead or complete, told from storage alone.

    manifest.json | plan.json + job.json + listing of shard files + heartbeats in run/ -> Status

Costs, for n tasks on a remote store: a request for each 1,000 shard files (four a task and split),
16 at a time, and one for each heartbeat; no commit record is read. Tokens and documents follow from
the sizes of the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.job import JobFile
from olm_data.dataset.manifest import JOB, MANIFEST, PLAN, VALIDATION, Manifest, read_manifest
from olm_data.dataset.plan import Plan, plan_digests
from olm_data.dataset.record import HEADER_BYTES, RECORD, tokens_header, tokens_suffix
from olm_data.dataset.shard import ENDS
from olm_data.errors import typed
from olm_data.path_kinds import kind_of, require
from olm_data.printing import Columns, Ordinal, Seconds
from olm_data.runners.base import Count
from olm_data.runners.heartbeat import PARENT, Beat, read_beats
from olm_data.storage.store import Store
from olm_data.tokenization.task_results import damaged_run, no_run, shard_files, split_stores

_URGENCY = {"dead": 0, "failed": 1, "running": 2, "interrupted": 3, "done": 4}
_WORKER = (
    *("name=worker", "host", "pid", "state", "seconds_since_heard=last heard of"),
    *("done=tasks done", "running=tasks at work", "documents"),
)


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's heartbeat tells.

    Attributes:
        state: as the worker told, or `dead` where it should run and is not heard of.
        running: numbers of the tasks at work.
        done: how many tasks it has done.
    """

    name: str
    host: str
    pid: Ordinal
    state: str
    seconds_since_heard: Seconds
    running: list[int]
    done: int
    documents: int
    text_bytes: int
    tokens: int

    @classmethod
    def of(cls, beat: Beat, now: float) -> WorkerStatus:
        """Return what a heartbeat tells at the wall clock time `now`."""
        return cls(
            name=beat.name,
            host=beat.host,
            pid=beat.pid,
            state="dead" if beat.state == "running" and not beat.alive(now) else beat.state,
            seconds_since_heard=round(beat.age(now)),
            running=sorted(beat.running),
            done=len(beat.tasks_done()),
            documents=beat.counts[Count.DOCUMENTS],
            text_bytes=beat.counts[Count.TEXT_BYTES],
            tokens=beat.counts[Count.TOKENS],
        )


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is, as `--json` prints it.

    Attributes:
        output: where it is.
        state: complete, running, finishing (all tasks done), failed, interrupted, or dead.
        tasks, done, running, left: how many of the plan; done are those with a commit record.
        documents, tokens: in the committed shards of all splits.
        text_bytes_per_second: all live workers together; 0 when none.
        seconds_left: until all tasks are done at this rate, or None.
        error: what ended the run, or None.
        workers: those that need somebody to look first.
        next: what to type next.
    """

    output: str
    state: str
    tasks: int
    done: int
    running: int = 0
    left: int = 0
    documents: int
    tokens: int
    text_bytes_per_second: int = 0
    seconds_left: Seconds | None = None
    error: str | None = None
    workers: list[WorkerStatus] = []
    next: str

    COLUMNS: ClassVar = {"workers": Columns(_WORKER, most=20)}


def read_status(output: str) -> Status:
    """Return how far the run at `output` is.

    Raises:
        InputError: no run has begun there.
        ValidationError: its plan is damaged.
    """
    if os.path.basename(output) == MANIFEST and kind_of(output) == "dataset":
        output = os.path.dirname(output) or "."
    require(output, "dataset", "unfinished dataset", "folder", "empty folder")
    store = Store(output)
    manifest = read_manifest(store) if store.exists(MANIFEST) else None
    try:
        plan_file = JobFile.read_from(store).plan_file
    except (FileNotFoundError, NotADirectoryError):
        plan_file = PLAN
    except MalformedJson as error:
        raise damaged_run(store, JOB, str(error)) from error
    try:
        plan = Plan.read(store, plan_file)
    except (FileNotFoundError, NotADirectoryError) as error:
        if manifest is not None:  # made elsewhere, and brought here without its plan
            return _complete(output, store, manifest)
        raise no_run(output) from error
    except MalformedJson as error:
        raise damaged_run(store, plan_file, str(error)) from error
    if manifest is not None and plan.digest in plan_digests(manifest):
        return _complete(output, store, manifest)
    files = [shard_files(split, plan) for split in split_stores(store, plan)]
    return judge(output, plan, files, read_beats(store), time.time())


def judge(
    output: str, plan: Plan, files: Sequence[dict[str, int]], beats: Sequence[Beat], now: float
) -> Status:
    """Return the status of a run without a manifest. Pure.

    Args:
        files: name -> size, of each split.
        beats: the heartbeats.
        now: wall clock time.
    """
    total = len(plan.tasks)
    item = 2 if plan.settings.vocab_size <= 65536 else 4
    weights = np.array([max(plan.text_bytes(task), 1) for task in range(total)], np.int64)
    done = np.zeros(total, bool)
    suffix, header = tokens_suffix(plan.settings.container), tokens_header(plan.settings.container)
    documents = tokens = 0
    for task in range(total):
        name = plan.shard(task)
        if name + RECORD not in files[0]:
            continue
        done[task] = True
        for split in files:
            tokens += max(0, split.get(name + suffix, 0) - header) // item
            documents += max(0, split.get(name + ENDS, 0) - HEADER_BYTES) // 8
    alive = [beat for beat in beats if beat.alive(now)]
    workers = [beat for beat in alive if beat.name != PARENT] or alive
    running = {t: row for beat in workers for t, row in beat.running.items() if not done[t]}
    rate = sum(beat.counts[Count.TEXT_BYTES] / max(beat.time - beat.started, 1) for beat in workers)
    left = float(weights[~done].sum()) - sum(
        min(int(weights[task]), row[Count.TEXT_BYTES]) for task, row in running.items()
    )
    state, error = _state(beats, alive, bool(done.all()))
    named = sorted(beats, key=lambda beat: (beat.name != PARENT, beat.name))
    told = [WorkerStatus.of(beat, now) for beat in named]
    again = "the same tokenize command again: it keeps what is done"
    return Status(
        output=output,
        state=state,
        tasks=total,
        done=int(done.sum()),
        running=len(running),
        left=total - int(done.sum()),
        documents=documents,
        tokens=tokens,
        text_bytes_per_second=round(rate),
        seconds_left=round(left / rate) if rate > 0 else None,
        error=error,
        workers=sorted(told, key=lambda one: _URGENCY.get(one.state, 5)),
        next=f"olm-data status {typed(output)}" if state == "running" else again,
    )


def _state(beats: Sequence[Beat], alive: Sequence[Beat], all_done: bool) -> tuple[str, str | None]:
    if alive:
        return "finishing" if all_done else "running", None
    told = [beat for beat in beats if beat.name == PARENT] or list(beats)
    for state in ("failed", "interrupted"):
        for beat in told:
            if beat.state == state:
                return state, beat.error.what if beat.error else None
    return "dead", None


def _complete(output: str, store: Store, manifest: Manifest) -> Status:
    manifests = [manifest]
    if store.child(VALIDATION).exists(MANIFEST):
        manifests.append(read_manifest(store.child(VALIDATION)))
    return Status(
        output=output,
        state="complete",
        tasks=len(manifest.shards),
        done=len(manifest.shards),
        documents=sum(each.totals.documents for each in manifests),
        tokens=sum(each.totals.tokens for each in manifests),
        next=f"olm-data verify {typed(output)}",
    )
