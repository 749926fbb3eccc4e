"""Workers elsewhere: what they live on, and what `olm-data status` tells of them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import plans
from support.beginning import Stop, begin
from support.command import arguments, environment, olm_data
from support.inline_runner import InlineRunner
from support.polling import wait_until
from support.project import Project
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.bounded_json import digest
from olm_data.counts import spell_ranges
from olm_data.dataset.plan import parse_tasks
from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.runners.base import Count, Runner, whole
from olm_data.runners.heartbeat import PARENT, STALE_SECONDS, Beat, StoredError, read_beats
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store
from olm_data.tokenization.status import judge, read_status
from olm_data.tokenization.stored_job import load_job, write_job
from olm_data.tokenization.work import find_tasks, work


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(120))


OPTIONS: dict[str, Any] = {"shard_tokens": 500, "holdout": "1/8", "bos": "<|endoftext|>"}


# --- workers -----------------------------------------------------------------------------------
def test_workers_that_know_only_the_output_make_the_same_bytes_as_a_local_run(
    source: Path, project: Project
) -> None:
    project.make([source], "whole", **OPTIONS)
    total = begin(source, project.tokenizer, project.out, **OPTIONS)
    assert total > 4
    first = olm_data("work", "out", "--tasks", "1-2,0", folder=project.folder)
    assert (first.returncode, first.stdout) == (0, "3 tasks done, 0 were finished before\n")
    rest = olm_data(
        *("work", project.out, "--tasks", f"0-{total - 1}", "--workers", 2), folder=Path("/")
    )
    assert rest.stdout == f"{total - 3} tasks done, 3 were finished before\n"
    made = project.make([source], runner=Stop(), **OPTIONS)
    assert made.kept_shards == total
    assert digests(project.out) == digests(project / "whole")


def test_workers_need_nothing_but_the_bucket(
    source: Path, tiny_tokenizer: Path, tmp_path: Path, s3: dict[str, str]
) -> None:
    output = f"s3://{s3['bucket']}/books/tokens"
    whole = make_dataset([source], tiny_tokenizer, tmp_path / "whole", shard_tokens=1000)
    total = begin(source, tiny_tokenizer, output, shard_tokens=1000)
    done = olm_data("work", output, "--tasks", f"0-{total - 1}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    made = make_dataset([source], tiny_tokenizer, output, runner=Stop(), shard_tokens=1000)
    assert made.manifest.digest == whole.manifest.digest
    assert Store(output).child("run").sizes() == {}


def test_a_worker_works_while_the_parent_holds_the_output(source: Path, project: Project) -> None:
    class Elsewhere(Runner):
        def run(self, job: Any, tasks: Any, total: int, *, done: Any, **_: Any) -> None:
            with pytest.raises(ConflictError), exclusive(Store(project.out)):
                pass
            spelled = spell_ranges(tasks)
            assert olm_data("work", project.out, "--tasks", spelled).returncode == 0
            for task in tasks:
                done(task, job.finished(task))

    project.make([source], runner=Elsewhere(), **OPTIONS)
    project.make([source], "whole", **OPTIONS)
    assert digests(project.out) == digests(project / "whole")


def test_a_new_parent_leaves_the_unfinished_files_of_workers_alone(tmp_path: Path) -> None:
    store = Store(tmp_path, staging_prefix=".worker-n1-")
    with store.staging() as mine:
        with Store(tmp_path).staging() as parents, exclusive(Store(tmp_path)):
            assert mine.exists()
            assert not parents.exists()  # its process is dead, or it would hold the lock
        assert not mine.exists()  # at its end the parent knows that no worker is left


def test_sigterm_ends_a_worker_and_a_rerun_goes_on(project: Project) -> None:
    source = project.write("a.jsonl", texts(6000))

    def shards() -> list[Path]:
        return list((project.out).glob("shard-*.json"))

    def terminated() -> tuple[int, str]:
        shutil.rmtree(project.out, ignore_errors=True)
        total = begin(source, project.tokenizer, project.out, shard_tokens=5000)
        worker = subprocess.Popen(
            arguments("work", project.out, "--tasks", f"0-{total - 1}", "--name", "w"),
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: worker.poll() is not None or shards(), "a shard")
        worker.send_signal(signal.SIGTERM)
        _, said = worker.communicate()
        return worker.returncode, said

    # Again where a busy machine brings the signal after the end.
    code, said = next((c, s) for c, s in (terminated() for _ in range(5)) if c)
    assert (code, said.strip().count("\n")) == (130, 0), said
    assert [beat.state for beat in read_beats(Store(project.out), "w")] == ["interrupted"]
    assert not list((project.out).glob(".worker-*"))
    made = project.make([source], shard_tokens=5000)
    assert made.kept_shards >= 1


def test_an_error_of_a_task_ends_the_worker_with_its_exit_code_and_reaches_its_heartbeat(
    source: Path, project: Project
) -> None:
    total = begin(source, project.tokenizer, project.out, **OPTIONS)
    source.write_bytes(source.read_bytes()[:-100])
    failed = olm_data("work", project.out, "--tasks", str(total - 1), "--name", "w")
    assert failed.returncode == 4
    assert "changed while it was being read" in failed.stderr
    (beat,) = read_beats(Store(project.out), "w")
    assert beat.state == "failed"
    error = beat.error.restored()
    assert isinstance(error, InputError)
    assert "changed" in error.what


def test_tasks_that_do_not_exist_are_refused(source: Path, project: Project) -> None:
    total = begin(source, project.tokenizer, project.out, **OPTIONS)
    with pytest.raises(UsageError, match=f"there is no task {total}"):
        work(str(project.out), [total], workers=1, name="w", note=print)
    with pytest.raises(InputError, match="no run has begun") as caught:
        work(str(project / "none"), [0], workers=1, name="w", note=print)
    assert "olm-data tokenize" in str(caught.value.fix)


# --- lists of tasks ----------------------------------------------------------------------------
@given(st.sets(st.integers(0, 300)))
def test_every_list_of_tasks_has_one_spelling(tasks: set[int]) -> None:
    spelled = spell_ranges(sorted(tasks))
    if tasks:
        assert parse_tasks(spelled) == sorted(tasks)
    assert "0-1-" not in spelled


@pytest.mark.parametrize("text", ["", "a", "3-", "5-3", "-1", "1,,2", "1.5", "1;2"])
def test_what_spells_no_tasks_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a range of tasks"):
        parse_tasks(text)


def test_the_parts_of_a_list_are_all_of_it_once(tmp_path: Path) -> None:
    Store(tmp_path / "run").put("list", b"0-10,20")
    parts = [find_tasks(str(tmp_path), "@list", f"{k}/5") for k in range(5)]
    assert sorted(task for part in parts for task in part) == [*range(11), 20]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert find_tasks(str(tmp_path), "7", None) == [7]
    for part in ("5/5", "1", "a/b", "-1/5"):
        with pytest.raises(UsageError, match="INDEX/COUNT"):
            find_tasks(str(tmp_path), "@list", part)
    with pytest.raises(UsageError, match="no such list"):
        find_tasks(str(tmp_path), "@other", None)


def test_the_stored_job_is_the_job(source: Path, project: Project) -> None:
    seen: list[Any] = []

    class Keep(Runner):
        def run(self, job: Any, tasks: Any, total: int, **_: Any) -> None:
            seen.append(job)
            assert load_job(str(project.out)) == job
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        project.make([source], runner=Keep(), special="allow", **OPTIONS)
    assert seen


def test_a_rerun_looks_at_a_job_of_any_size_that_can_be_written(
    source: Path, monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    class Again(Runner):
        def run(self, job: Any, tasks: Any, total: int, **_: Any) -> None:
            before = (project.out / "job.json").stat()
            assert Store.read.__kwdefaults__ is not None
            monkeypatch.setitem(Store.read.__kwdefaults__, "limit", 10)  # of what knows no other
            write_job(job, "plan.json")
            assert (project.out / "job.json").stat() == before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        project.make([source], runner=Again(), **OPTIONS)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("job.json", lambda data: b"{", "damaged"),
        ("job.json", lambda data: b"[]", "damaged"),
        ("job.json", lambda data: data.replace(b'"holdout"', b'"h"'), "damaged"),
        ("job.json", lambda data: data.replace(b'"read": {', b'"read": {"more": 1,'), "damaged"),
        ("plan.json", lambda data: data.replace(b"500", b"501"), "damaged"),
        ("tokenizer.json", lambda data: data + b" ", "not the tokenizer"),
        ("job.json", lambda data: data.replace(b'"probe_sha256": "', b'"probe_sha256": "0'), "ids"),
        ("job.json", lambda data: data.replace(b'"pyarrow": "', b'"pyarrow": "0'), "versions"),
    ],
)
def test_files_of_another_run_or_machine_are_refused(
    name: str, change: Any, says: str, source: Path, project: Project
) -> None:
    begin(source, project.tokenizer, project.out, shard_tokens=125)
    path = project.out / name
    before = path.read_bytes()
    path.write_bytes(change(before))
    if says in ("ids", "versions"):  # what a forger would do
        value = json.loads(path.read_bytes())
        path.write_text(
            json.dumps(
                value | {"digest": digest({k: v for k, v in value.items() if k != "digest"})}
            )
        )
    assert path.read_bytes() != before
    with pytest.raises(ValidationError, match=says):
        load_job(str(project.out))


NOW = 1_000_000.0


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


def test_a_run_is_seen_from_another_process_while_it_works(source: Path, project: Project) -> None:
    seen: list[Any] = []

    class Look(InlineRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            whole(job.run(0, lambda **_: None))
            seen.append(olm_data("status", "out", folder=project.folder).stdout)
            super().run(job, tasks, total, **callbacks)

    project.make([source], runner=Look(), **OPTIONS)
    assert "state      running\n" in seen[0]
    assert "done       1\n" in seen[0]
    assert re.search(r"\n  parent +\S+ +\d+ +running ", seen[0])
