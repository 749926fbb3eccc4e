"""`olm-data work` and the files it lives on: job.json, heartbeats, lists of tasks."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.beginning import Stop, begin
from support.command import arguments, environment, olm_data
from support.polling import wait_until
from support.project import Project
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.counts import spell_ranges
from olm_data.dataset.plan import parse_tasks
from olm_data.errors import ConflictError, InputError, UsageError
from olm_data.runners.base import Runner
from olm_data.runners.heartbeat import read_beats
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store
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
