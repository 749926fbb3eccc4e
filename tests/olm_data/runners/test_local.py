"""Runners: every task once, deaths survived, errors and counts brought back; heartbeats."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.command import python
from support.inline_runner import InlineRunner
from support.jobs import Durable, Environment, Squares

from olm_data.errors import InputError, OlmError, ResourceError, StorageError
from olm_data.runners.base import Count, Deferred, whole
from olm_data.runners.fork_server import ONE_THREAD
from olm_data.runners.heartbeat import (
    BEAT_SECONDS,
    STALE_SECONDS,
    Heartbeat,
    StoredError,
    forget_ended,
    read_beats,
)
from olm_data.runners.local import LocalRunner, Reporter, granted_cpus
from olm_data.storage.store import Store


def run(runner: Any, job: Any, tasks: list[int], total: int) -> tuple[dict, np.ndarray, list]:
    results: dict[int, int] = {}
    counts = np.zeros((total, len(Count)), np.int64)
    notes: list[str] = []

    def watch(now: np.ndarray, running: Any) -> None:
        counts[:] = now

    def done(task: int, result: int) -> None:
        assert task not in results
        results[task] = result

    runner.run(job, tasks, total, done=done, watch=watch, note=notes.append)
    return results, counts, notes


@pytest.mark.parametrize("make", [InlineRunner, lambda: LocalRunner(1), lambda: LocalRunner(3)])
def test_each_task_is_done_once_and_counted(make: Callable[[], Any], tmp_path: Path) -> None:
    results, counts, notes = run(make(), Squares(str(tmp_path)), [0, 1, 2, 4], 5)
    assert results == {0: 0, 1: 1, 2: 4, 4: 16}
    assert counts[:, Count.DOCUMENTS].tolist() == [1, 1, 1, 0, 1]
    assert counts[:, Count.TOKENS].sum() == 400
    assert (counts[[0, 1, 2, 4], Count.PEAK_KIB] > 0).all()
    assert notes == []


def test_no_task_is_no_work(tmp_path: Path) -> None:
    assert run(LocalRunner(2), Squares(str(tmp_path)), [], 3)[0] == {}


def test_a_killed_worker_is_replaced_and_its_task_done_again(tmp_path: Path) -> None:
    job = Squares(str(tmp_path), deaths=2)
    results, counts, notes = run(LocalRunner(2), job, [0, 1, 2, 3], 4)
    assert results == {0: 0, 1: 1, 2: 4, 3: 9}
    assert counts[:, Count.DOCUMENTS].tolist() == [1, 1, 1, 1]  # the lost work is not counted twice
    assert len(notes) == 2
    assert all("SIGKILL" in note and "input-2.jsonl" in note for note in notes)


@pytest.mark.parametrize(
    ("dies_by", "said"), [(0, "ended by itself"), (signal.SIGSEGV, "a crash in native code")]
)
def test_want_of_memory_is_given_as_the_reason_only_for_sigkill(
    tmp_path: Path, dies_by: int, said: str
) -> None:
    job = Squares(str(tmp_path), deaths=99, dies_by=dies_by)
    with pytest.raises(ResourceError, match="3 times") as caught:
        run(LocalRunner(1), job, [2], 3)
    assert said in str(caught.value)
    assert "memory" not in f"{caught.value.why} {caught.value.fix}"


def test_an_error_for_the_user_comes_back_whole(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        run(LocalRunner(2), Squares(str(tmp_path), fault="input"), [0, 1, 2], 3)
    error = caught.value
    assert (error.what, error.where, error.why, error.fix) == (
        "bad line",
        "a.jsonl line 3",
        "w",
        "f",
    )


def test_a_defect_comes_back_with_the_workers_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as caught:
        run(LocalRunner(1), Squares(str(tmp_path), fault="defect"), [2], 3)
    assert "in run" in str(caught.value.__cause__)


def test_a_worker_out_of_memory_says_which_input(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="memory") as caught:
        run(LocalRunner(1), Squares(str(tmp_path), fault="memory"), [2], 3)
    assert caught.value.where == "input-2.jsonl"


def test_workers_got_ready_do_the_work_of_an_equal_job_and_prepare_once(tmp_path: Path) -> None:
    runner, job = LocalRunner(2), Squares(str(tmp_path), prepared=str(tmp_path / "prepared"))
    with runner.ready(job, 2, 4):
        results, _, notes = run(runner, replace(job), [0, 1, 2, 3], 4)
    assert results == {0: 0, 1: 1, 2: 4, 3: 9}
    assert (tmp_path / "prepared").read_bytes() == b"xx"
    assert notes == []


def test_workers_got_ready_for_another_job_are_not_used(tmp_path: Path) -> None:
    runner, job = LocalRunner(2), Squares(str(tmp_path))
    with runner.ready(Squares(str(tmp_path), fault="defect"), 2, 3):
        assert run(runner, job, [0, 1, 2], 3)[0] == {0: 0, 1: 1, 2: 4}
    with runner.ready(job, 2, 3):
        assert run(runner, job, [0, 1, 2, 3], 4)[0] == {0: 0, 1: 1, 2: 4, 3: 9}


def test_workers_have_the_environment_of_their_parent_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OLM_TEST_SECRET", "old")
    first = run(LocalRunner(1), Environment(), [0], 1)[0][0]  # the fork server runs from here on
    assert (first["OLM_TEST_SECRET"], first["OMP_NUM_THREADS"]) == ("old", "1")
    monkeypatch.delenv("OLM_TEST_SECRET")
    monkeypatch.setenv("OLM_TEST_KEY", "new")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    second = run(LocalRunner(1), Environment(), [0], 1)[0][0]
    assert second["OLM_TEST_KEY"] == "new"
    assert "OLM_TEST_SECRET" not in second
    assert second["OMP_NUM_THREADS"] == "1"


def test_workers_got_ready_in_vain_are_gone_after_the_block(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with LocalRunner(2).ready(Squares(str(tmp_path)), 5, 3):
        started = set(multiprocessing.active_children()) - before
        assert len(started) == 2
    assert not any(worker.is_alive() for worker in started)


def test_the_fork_server_has_one_thread_and_the_modules_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.endswith("_NUM_THREADS")]:
        monkeypatch.delenv(name)
    done = python(
        tmp_path,
        """
        import multiprocessing, os, sys
        from pathlib import Path
        from olm_data.runners import fork_server

        def look(pipe):
            status = Path(f"/proc/{os.getppid()}/status").read_text()
            threads = status.split("Threads:")[1].split()[0]
            pipe.send((threads, "pyarrow.parquet" in sys.modules, "numpy" in sys.modules))

        if __name__ == "__main__":
            fork_server.start(["numpy", "pyarrow.parquet", "not_installed"])
            context = multiprocessing.get_context("forkserver")
            ours, theirs = context.Pipe()
            context.Process(target=look, args=(theirs,)).start()
            theirs.close()
            print(*ours.recv(), "OPENBLAS_NUM_THREADS" in os.environ)
        """,
    )
    assert done.stdout == "1 True True False\n", done.stderr


FORKED = """
import os, sys, threading
from support.jobs import Squares
from olm_data.runners.local import LocalRunner

runner, job, results = LocalRunner(3, fork=True), Squares(".", deaths=1, prepared="prepared"), {}
quiet = lambda *_: None
os.chdir(sys.argv[1])
if sys.argv[2] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if __name__ == "__main__":
    with runner.ready(job, 3, 5):
        print(*{w.process._start_method for w in runner._crew.idle})
        runner.run(job, range(5), 5, done=results.__setitem__, watch=quiet, note=quiet)
    print(sorted(results.items()), len(open("prepared").read()))
"""


@pytest.mark.parametrize(("threads", "method", "least"), [("one", "fork", 2), ("threads", "", 4)])
def test_a_process_of_one_thread_prepares_once_for_the_workers_that_it_forks(
    tmp_path: Path, repository: Path, threads: str, method: str, least: int
) -> None:
    # each loads for itself where they come from the fork server: three, and the one for the dead
    env = os.environ | ONE_THREAD | {"PYTHONPATH": f"{repository}:{repository / 'tests'}"}
    script = tmp_path / "fork.py"
    script.write_text(FORKED)
    words = [sys.executable, str(script), str(tmp_path), threads]
    came, found = subprocess.check_output(words, env=env, text=True, timeout=1200).splitlines()
    assert (came, found) == (method or "forkserver", f"{[(n, n * n) for n in range(5)]} {least}")


@pytest.mark.parametrize("fork", [False, True])
def test_workers_end_with_a_parent_that_is_killed(
    tmp_path: Path, repository: Path, fork: bool
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, threading
            from olm_data.runners.local import LocalRunner

            class Hang:
                def prepare(self):
                    pass

                def run(self, task, report):
                    os.write(1, b"%d\\n" % os.getpid())
                    threading.Event().wait()

                def describe(self, task):
                    return "x"

            if __name__ == "__main__":
                quiet = lambda *_: None
                runner, job = LocalRunner(2, fork="fork" in sys.argv), Hang()
                with runner.ready(job, 2, 2):
                    runner.run(job, [0, 1], 2, done=quiet, watch=quiet, note=quiet)
            """
        )
    )
    parent = subprocess.Popen(
        [sys.executable, str(script), *(["fork"] if fork else [])],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": str(repository)},
    )
    ends = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(2)]
    parent.kill()
    # the pipe ends when every process that holds its other end, workers included, is gone
    assert parent.stdout.read() == ""
    parent.wait()
    parent.stdout.close()
    for end in ends:  # it is readable once the process has ended
        assert select.select([end], [], [], 60)[0]
        os.close(end)


def test_the_granted_cpus_are_those_of_the_affinity_at_most(repository: Path) -> None:
    assert 1 <= granted_cpus() <= len(os.sched_getaffinity(0))
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
    code += "from olm_data.runners.local import granted_cpus; print(granted_cpus())"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=repository) == b"1\n"


def test_the_next_task_begins_before_the_last_one_is_finished(tmp_path: Path) -> None:
    results, _, notes = run(LocalRunner(1), Durable(str(tmp_path), last=3), [0, 1, 2, 3], 4)
    assert (results, notes) == ({0: 0, 1: 1, 2: 4, 3: 9}, [])


def test_a_death_costs_both_tasks_of_the_worker_and_is_laid_to_the_one_at_work(
    tmp_path: Path,
) -> None:
    job = Durable(str(tmp_path), last=1, dies=1)
    results, _, notes = run(LocalRunner(1), job, [0, 1, 2, 3], 4)
    assert results == {0: 0, 1: 1, 2: 4, 3: 9}
    assert len(notes) == 1
    assert "SIGKILL" in notes[0]
    assert "input-2.jsonl" in notes[0]


def test_a_task_that_always_kills_its_worker_is_named_and_the_one_before_it_is_kept(
    tmp_path: Path,
) -> None:
    results: dict[int, int] = {}
    with pytest.raises(ResourceError, match="3 times") as caught:
        LocalRunner(1).run(
            Durable(str(tmp_path), last=1, dies=99),
            [0, 1, 2, 3],
            4,
            done=results.__setitem__,
            watch=lambda counts, running: None,
            note=lambda text: None,
        )
    assert caught.value.where == "input-2.jsonl"
    assert "SIGKILL" in caught.value.what
    assert "memory" in str(caught.value)
    assert results == {0: 0, 1: 1}  # tried again, it was alone with its worker


def test_an_error_while_a_task_is_made_durable_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="disk is gone") as caught:
        run(LocalRunner(1), Durable(str(tmp_path), last=3, fails=1), [0, 1, 2, 3], 4)
    assert caught.value.where == "input-1.jsonl"


def test_the_columns_of_counts_stay_as_heartbeats_hold_them() -> None:
    assert [count.name for count in Count] == [
        *("DOCUMENTS", "TEXT_BYTES", "TOKENS", "DROPPED", "BAD", "READ_US", "ENCODE_US"),
        *("WRITE_US", "BY_REFERENCE", "PEAK_KIB"),
    ]


def test_a_reporter_adds_to_its_row_and_begins_anew_but_for_the_memory() -> None:
    row = np.full(len(Count), 7, np.int64)
    report = Reporter(row)
    assert row[: Count.PEAK_KIB].tolist() == [0] * Count.PEAK_KIB
    report(documents=2, tokens=5)
    report(tokens=1)
    assert (row[Count.DOCUMENTS], row[Count.TOKENS]) == (2, 6)
    assert row[Count.PEAK_KIB] > 7


def test_what_is_left_of_a_task_can_be_finished_in_place(tmp_path: Path) -> None:
    job = Durable(str(tmp_path), last=0)
    begun = job.run(0, Reporter(np.zeros(len(Count), np.int64)))
    assert isinstance(begun, Deferred)
    assert whole(begun) == 0
    assert whole(3) == 3


def test_a_heartbeat_tells_what_its_process_did(tmp_path: Path) -> None:
    store, counts = Store(tmp_path), np.arange(3 * len(Count)).reshape(3, -1)
    with Heartbeat(store, "w", note=print) as heartbeat:
        (first,) = read_beats(store)
        assert (first.state, first.done, first.running) == ("running", "", {})
        heartbeat.saw(counts, [2])
        heartbeat.saw_done(1)
        heartbeat.saw_done(0)
    (last,) = read_beats(store)
    assert (last.state, last.done, last.tasks_done()) == ("done", "0-1", [0, 1])
    assert last.running[2] == counts[2].tolist()
    assert last.counts[Count.TOKENS] == counts[:, Count.TOKENS].sum()
    assert last.counts[Count.PEAK_KIB] == counts[:, Count.PEAK_KIB].max()
    assert not last.alive(last.time)


def test_a_process_not_heard_of_for_long_is_dead_whatever_the_clock_did(tmp_path: Path) -> None:
    with Heartbeat(Store(tmp_path), "w", note=print):
        (beat,) = read_beats(Store(tmp_path))
        assert beat.alive(beat.time + BEAT_SECONDS)
        assert not beat.alive(beat.time + STALE_SECONDS)
        assert beat.age(beat.time - 86_400) == 0  # the reader's clock is behind
        forget_ended(Store(tmp_path))
        assert len(read_beats(Store(tmp_path))) == 1
    forget_ended(Store(tmp_path))
    assert read_beats(Store(tmp_path)) == []


def test_heartbeats_that_cannot_be_written_are_said_once_and_stop_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    with Heartbeat(Store(tmp_path), "w", note=said.append):
        (tmp_path / "run" / "w.json").unlink()
        (tmp_path / "run").rmdir()
        (tmp_path / "run").write_text("in the way")
    assert len(said) == 1
    assert "heartbeats" in said[0]


def test_a_worker_with_many_tasks_of_its_own_is_still_heard(tmp_path: Path) -> None:
    with Heartbeat(Store(tmp_path), "w", note=print) as heartbeat:
        for task in range(0, 400_000, 2):
            heartbeat.saw_done(task)
    assert (tmp_path / "run" / "w.json").stat().st_size > 1 << 20
    (beat,) = read_beats(Store(tmp_path))
    assert len(beat.tasks_done()) == 200_000


def test_damaged_heartbeats_are_left_out(tmp_path: Path) -> None:
    for n, data in enumerate((b"", b"{", b"[]", b"{}", b"\xff")):
        Store(tmp_path / "run").put(f"{n}.json", data)
    assert read_beats(Store(tmp_path)) == []


@pytest.mark.parametrize(
    "error",
    [
        InputError("a", where="b", why="c", fix="d"),
        type("Special", (StorageError,), {})("a"),
        KeyError("x"),
        OSError("y"),
    ],
)
def test_an_error_survives_its_way_through_a_heartbeat(error: Exception) -> None:
    data = msgspec.json.encode(StoredError.of(error))
    again = msgspec.json.decode(data, type=StoredError).restored()
    if isinstance(error, OlmError):
        assert isinstance(again, OlmError)
        assert (again.exit_code, str(again)) == (error.exit_code, str(error))
    else:
        assert type(again) is RuntimeError
        assert type(error).__name__ in str(again)
