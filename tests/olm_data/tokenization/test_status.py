"""`olm-data status`: what storage alone tells about a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import plans
from support.beginning import begin
from support.command import olm_data
from support.project import Project
from support.tokenizing import texts, write_jsonl

from olm_data.counts import spell_ranges
from olm_data.errors import InputError, ValidationError
from olm_data.runners.base import Count
from olm_data.runners.heartbeat import PARENT, STALE_SECONDS, Beat, StoredError
from olm_data.tokenization.status import judge, read_status
from olm_data.tokenization.work import work

OPTIONS: dict[str, Any] = {"shard_tokens": 500, "holdout": "1/8"}
NOW = 1_000_000.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(120))


def beat(name: str, **changes: Any) -> Beat:
    """A heartbeat of a worker that has been at work for 100 s and was heard of 5 s ago."""
    counts = [0] * len(Count)
    counts[Count.TEXT_BYTES] = 9500
    ordinary = Beat(
        version=1,
        name=name,
        host="n1",
        pid=1,
        started=NOW - 100,
        time=NOW - 5,
        state="running",
        done="",
        running={},
        counts=counts,
        error=None,
    )
    return msgspec.structs.replace(ordinary, **changes)


def plan_of(tasks: int) -> Any:
    units = [(0, n, n + 1, 1000) for n in range(tasks)]
    return plans.plan_of([("a", 1000 * tasks, "")], units, 1000)


def files(*tasks: int) -> dict[str, int]:
    """Files of shards with 10 tokens of 2 bytes in 3 documents."""
    return {
        f"shard-{task:05d}.{kind}": size
        for task in tasks
        for kind, size in (("json", 9), ("tokens.npy", 148), ("ends.npy", 152), ("docs.parquet", 9))
    }


# --- from storage ------------------------------------------------------------------------------
def test_an_interrupted_run_shows_what_is_written_and_what_to_type(
    source: Path, project: Project
) -> None:
    total = begin(source, project.tokenizer, project.out, **OPTIONS)
    work(str(project.out), [0, 2], workers=1, name="w", note=print)
    shown = json.loads(olm_data("status", "out", "--json", folder=project.folder).stdout)
    assert (shown["state"], shown["tasks"], shown["done"]) == ("interrupted", total, 2)
    assert shown["left"] == total - 2
    assert [worker["name"] for worker in shown["workers"]] == [PARENT, "w"]
    assert shown["workers"][1]["state"] == "done"
    assert "tokenize command again" in shown["next"]
    done = shown["workers"][1]
    assert (shown["documents"], shown["tokens"]) == (done["documents"], done["tokens"])


def test_a_complete_dataset_is_complete(source: Path, project: Project) -> None:
    made = project.make([source], **OPTIONS)
    found = read_status(str(project.out))
    assert (found.state, found.documents) == ("complete", 120)
    assert found.tasks == found.done == len(made.manifest.shards)
    assert found.next == f"olm-data verify {project / 'out'}"


def test_the_status_of_a_run_in_a_bucket_needs_the_bucket_only(
    source: Path, tiny_tokenizer: Path, s3: dict[str, str]
) -> None:
    output = f"s3://{s3['bucket']}/status/out"
    total = begin(source, tiny_tokenizer, output, shard_tokens=1000)
    assert olm_data("work", output, "--tasks", 1).returncode == 0
    found = read_status(output)
    assert (found.state, found.tasks, found.done) == ("interrupted", total, 1)
    assert found.tokens == sum(worker.tokens for worker in found.workers) > 0


def test_no_run_and_damaged_runs_are_told_apart(source: Path, project: Project) -> None:
    with pytest.raises(InputError, match="no run has begun") as caught:
        read_status(str(project / "none"))
    assert "olm-data tokenize" in str(caught.value.fix)
    begin(source, project.tokenizer, project.out, **OPTIONS)
    for name in ("plan.json", "job.json"):
        before = (project.out / name).read_bytes()
        for data in (b"{", b"[]", b"{}"):
            (project.out / name).write_bytes(data)
            with pytest.raises(ValidationError, match="damaged"):
                read_status(str(project.out))
        (project.out / name).write_bytes(before)


# --- from values -------------------------------------------------------------------------------
def test_time_left_comes_from_the_speed_of_live_workers() -> None:
    row = [0] * len(Count)
    row[Count.TEXT_BYTES] = 400
    workers = [beat(PARENT), beat("a", running={2: row}), beat("b")]
    found = judge("out", plan_of(10), [files(0, 1)], workers, NOW)
    assert (found.state, found.done, found.running) == ("running", 2, 1)
    assert (found.tokens, found.documents) == (20, 6)
    assert found.text_bytes_per_second == 200  # of a and b; the parent only watches
    assert found.seconds_left == (8 * 1000 - 400) / 200


def test_a_run_whose_parent_and_workers_fell_silent_is_dead() -> None:
    silent = NOW - STALE_SECONDS - 1
    workers = [beat(PARENT, time=silent), beat("a", time=silent)]
    found = judge("out", plan_of(3), [files(0)], workers, NOW)
    assert (found.state, found.text_bytes_per_second, found.seconds_left) == ("dead", 0, None)
    assert {worker.state for worker in found.workers} == {"dead"}
    assert "again" in found.next


def test_a_run_without_its_parent_is_running_while_a_worker_is() -> None:
    workers = [beat(PARENT, time=NOW - 1e6), beat("a")]
    assert judge("out", plan_of(3), [files()], workers, NOW).state == "running"


def test_an_error_that_ended_the_run_is_shown() -> None:
    error = StoredError("InputError", "bad text")
    found = judge("out", plan_of(3), [files()], [beat(PARENT, state="failed", error=error)], NOW)
    assert (found.state, found.error) == ("failed", "bad text")


def test_a_hundred_thousand_tasks_and_a_thousand_workers_are_judged_in_one_pass() -> None:
    total = 100_000
    done = files(*range(0, total, 2))
    workers = [
        beat(f"w{n}", done=spell_ranges(list(range(2 * n, total, 2000)))) for n in range(1000)
    ]
    found = judge("out", plan_of(total), [done, done], workers, NOW)
    assert (found.done, found.documents, found.tokens) == (50_000, 300_000, 1_000_000)
    assert len(found.workers) == 1000
