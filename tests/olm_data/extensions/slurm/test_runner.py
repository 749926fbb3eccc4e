"""The Slurm runner, on a real cluster, and Slurm's commands as functions."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import arguments, environment
from support.project import Project
from support.slurm import MAX_ARRAY_SIZE, Cluster
from support.tokenizing import digests, texts, write_jsonl

from olm_data.dataset.plan import parse_tasks
from olm_data.errors import ConflictError, InputError, ResourceError, UsageError
from olm_data.extensions.slurm import runner
from olm_data.extensions.slurm.runner import SlurmRunner, array_elements, array_name, batch_script
from olm_data.runners.base import Count
from olm_data.storage.store import Store

pytestmark = pytest.mark.xdist_group("slurm")


HELD = ("--runner", "slurm", "--slurm", "hold")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(120))


def command(source: Path, tokenizer: Path, output: Path, *more: str) -> list[str]:
    """Return a tokenise command for `source`, cut into a few tasks."""
    words = (
        "--tokenizer",
        tokenizer,
        "--output",
        output,
        "--encoder",
        "hf",
        "--shard-tokens",
        1000,
    )
    return arguments("tokenize", source, *map(str, words), *more)


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Read the standard error of a process until a line with `words`; return that line."""
    seen = ""
    for line in process.stderr:
        seen += line
        if words in line:
            return line
    raise AssertionError(f"{words!r} was never said: {seen}")


# --- on a cluster ------------------------------------------------------------------------------
@pytest.mark.slow
def test_more_tasks_than_an_array_may_have_give_the_bytes_of_a_local_run(
    slurm: Cluster, source: Path, project: Project
) -> None:
    log = io.StringIO()
    options: dict[str, Any] = {"shard_tokens": 300, "holdout": "1/8", "log": log}
    whole = project.make([source], "whole", **options)
    runner = SlurmRunner(4, options=["time=5"], logs=project / "logs")
    made = project.make([source], runner=runner, **options)
    assert len(made.manifest.shards) > MAX_ARRAY_SIZE
    assert f"in {MAX_ARRAY_SIZE} elements" in log.getvalue()
    assert made.manifest.digest == whole.manifest.digest
    assert digests(project.out) == digests(project / "whole")
    for count in (Count.DOCUMENTS, Count.TOKENS):
        assert made.now(count) == whole.now(count)
    assert len(list((project / "logs").iterdir())) == MAX_ARRAY_SIZE


@pytest.mark.slow
def test_a_command_that_was_killed_leaves_its_array_and_the_next_one_follows_it(
    slurm: Cluster, source: Path, project: Project
) -> None:
    words = command(source, project.tokenizer, project.out, *HELD)
    first = start(words, project.folder)
    job = read_until(first, "Slurm job").split()[2].rstrip(":")
    first.kill()
    first.communicate()
    second = start(words, project.folder)
    assert f"Slurm job {job} " in read_until(second, "following it")
    slurm.run("scontrol", "release", job)
    _, said = second.communicate()
    assert second.returncode == 0, said
    assert "Slurm job" not in said.replace(f"Slurm job {job} waits", "")  # none was submitted
    project.make([source], "whole", shard_tokens=1000)
    assert digests(project.out) == digests(project / "whole")


def test_an_interrupted_command_cancels_its_array(
    slurm: Cluster, source: Path, project: Project
) -> None:
    parent = start(command(source, project.tokenizer, project.out, *HELD), project.folder)
    read_until(parent, "waits: JobHeldUser")
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate()
    assert parent.returncode == 130
    assert "cancelled Slurm job" in said
    assert slurm.run("squeue", "-h") == ""


def test_an_error_of_a_task_comes_back_and_ends_the_array(
    slurm: Cluster, source: Path, project: Project
) -> None:
    class Spoil(SlurmRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            source.write_bytes(source.read_bytes()[:-100])
            super().run(job, tasks, total, **callbacks)

    runner = Spoil(1, logs=project / "logs")
    with pytest.raises(InputError, match="changed while it was being read") as caught:
        project.make([source], runner=runner, shard_tokens=4000)
    assert caught.value.where == "a.jsonl"
    slurm.run("scontrol", "ping")
    assert "PENDING" not in slurm.run("squeue", "-h", "-o", "%T")


def test_jobs_that_end_without_a_task_done_are_an_error_with_their_log(
    slurm: Cluster, source: Path, monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    broken = project / "broken python"
    broken.write_text("#!/bin/sh\necho 'no such environment on this node'\nexit 1\n")
    broken.chmod(0o755)
    log = io.StringIO()
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.setattr("olm_data.extensions.slurm.runner.RETRIES", 1)
    runner = SlurmRunner(1, logs=project / "logs")
    with pytest.raises(ResourceError, match="ended the job of task 0 2 times") as caught:
        project.make([source], runner=runner, shard_tokens=4000, log=log)
    assert log.getvalue().count("trying them again") == 1
    assert "no such environment" in str(caught.value.why)
    assert str(project / "logs") in str(caught.value.where)


def test_what_slurm_refuses_is_said_in_its_words(
    slurm: Cluster, source: Path, project: Project
) -> None:
    runner = SlurmRunner(1, options=["partition=nowhere"], logs=project / "logs")
    with pytest.raises(UsageError, match="refused") as caught:
        project.make([source], runner=runner)
    assert "partition" in str(caught.value.why)


def test_an_array_of_other_work_on_the_same_output_is_a_conflict(
    slurm: Cluster, source: Path, project: Project
) -> None:
    class Rival(SlurmRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            other = array_name(job).rsplit("-", 1)[0] + "-0123456789ab"
            runner.submit("#!/bin/sh\n", ["--hold", f"--job-name={other}"])
            super().run(job, tasks, total, **callbacks)

    with pytest.raises(ConflictError, match="another run") as caught:
        project.make([source], runner=Rival(1, logs=project / "logs"))
    assert "scancel" in str(caught.value.fix)


# --- without one -------------------------------------------------------------------------------
def test_without_slurm_the_command_says_what_is_missing(
    source: Path, monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    monkeypatch.setenv("PATH", str(project.folder))
    with pytest.raises(ResourceError, match="there is no squeue on this machine"):
        project.make([source], runner=SlurmRunner(1))


@pytest.mark.parametrize(
    ("tasks", "workers", "largest", "elements"),
    [(100_000, 64, 1001, 256), (100_000, 1000, 1001, 1001), (3, 64, 1001, 3), (5, 1, 10_000, 4)],
)
def test_an_array_has_no_more_elements_than_tasks_than_allowed_or_than_useful(
    tasks: int, workers: int, largest: int, elements: int
) -> None:
    assert array_elements(tasks, workers, largest) == elements


def test_the_script_of_a_hundred_thousand_tasks_is_as_long_as_that_of_one(tmp_path: Path) -> None:
    script = batch_script("/a folder/it's", "tasks-0", 256)
    assert len(script) < 1000
    assert "'/a folder/it'\"'\"'s'" in script
    spelled = ",".join(str(task) for task in range(0, 200_000, 2)).encode()
    Store(tmp_path / "run").put("tasks-0", spelled)
    assert len(parse_tasks(spelled.decode())) == 100_000


@pytest.mark.parametrize("word", ["array=1-5", "output=x", "requeue", "=x", "time=", "-t=1", "A=1"])
def test_options_that_are_none_or_not_the_users_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--slurm"):
        runner.sbatch_options([word])
    assert runner.sbatch_options(["time=1:00", "exclusive"]) == ["--time=1:00", "--exclusive"]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the path: its scripts are the commands."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def script(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_elements_of_an_array_run_or_wait_for_a_reason(commands: Path) -> None:
    script(
        commands,
        "squeue",
        "echo '0|RUNNING|None'; echo '3|COMPLETING|None'; echo '7|PENDING|Resources'",
    )
    found = runner.state("1")
    assert found == runner.ArrayState(frozenset({0, 3}), {7: "Resources"})
    assert not found.ended


def test_a_job_that_slurm_forgot_has_ended_and_silence_is_no_answer(commands: Path) -> None:
    script(commands, "squeue", "echo 'Invalid job id specified' >&2; exit 1")
    found = runner.state("1")
    assert found.ended
    script(commands, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert runner.state("1") is None
    with pytest.raises(ResourceError, match="does not answer") as caught:
        runner.live_jobs("olm-")
    assert "Unable to contact" in str(caught.value.why)


def test_the_id_of_a_job_is_told_without_its_cluster(commands: Path) -> None:
    script(commands, "sbatch", "echo '42;cluster'")
    assert runner.submit("#!/bin/sh", []) == "42"
    script(commands, "scontrol", "echo 'MaxArraySize            = 1001'")
    assert runner.largest_array() == 1001
