"""FAULTS rows 1 and 2: SIGKILL of tokenise, a worker or a node: a rerun gives the quiet bytes."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
from pathlib import Path

import pytest
from support.command import REPOSITORY, arguments, environment, olm_data, program
from support.killed_worker import Dying
from support.polling import wait_until
from support.slurm import NODES, Cluster
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.errors import ResourceError
from olm_data.extensions.ray.runner import RayRunner
from olm_data.runners.base import Count
from olm_data.runners.local import LocalRunner


def kill_loop(folder: Path, tokenizer: Path, *mode: str) -> list[list]:
    """What came of each kill: the operation, and the files that differ after the rerun: None."""
    for k in range(2):
        write_jsonl(folder / f"{k}.jsonl", [*texts(12, 12 * k), "", b"bad"])
    done = program(REPOSITORY / "tests" / "support" / "kill_loop.py", folder, tokenizer, *mode)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in seen if line[1] is not None] == []
    return seen


@pytest.mark.slow
def test_01_killed_at_every_disk_operation_a_rerun_gives_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    seen = kill_loop(tmp_path, tiny_tokenizer, "every")
    kinds = {line[0].split(": ")[1].split(" ")[0] for line in seen}
    assert any("quarantine" in line[0] or ".jsonl.zst" in line[0] for line in seen)
    assert kinds >= {"open", "write", "half-written", "fsync", "replace", "link"}
    assert len(seen) > 80


def test_01_killed_at_random_times_a_rerun_gives_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    seen = kill_loop(tmp_path, tiny_tokenizer, "random", "1", "10")
    assert len(seen) == 10


@pytest.mark.slow
def test_01_a_shuffled_selection_killed_at_random_times_ends_in_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "ids.txt").write_text("0-3\n1-7\n")
    options = {
        "exclude_ids": str(tmp_path / "ids.txt"),
        "where": "text != 'gone'",
        "sample": "4/5",
        "limit": 18,
        "shuffle_documents": True,
        "seed": 3,
    }
    seen = kill_loop(tmp_path, tiny_tokenizer, "random", "2", "12", json.dumps(options))
    assert len(seen) == 12


@pytest.mark.slow
def test_01_the_command_itself_killed_again_and_again_ends_in_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(400))

    def command(output: str) -> tuple[str | Path, ...]:
        words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", tmp_path / output)
        return (*words, "--shard-tokens", "1000", "--holdout", "0.1", "--workers", "2")

    assert olm_data(*command("whole")).returncode == 0
    moments = random.Random(1)
    killed = 0
    for _ in range(4):
        process = subprocess.Popen(
            arguments(*command("out")),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(moments.uniform(0.3, 1.2))
        except subprocess.TimeoutExpired:
            process.kill()
            killed += 1
        process.wait()
    last = olm_data(*command("out"))
    assert last.returncode == 0, last.stderr
    assert killed > 0
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.slow
def test_01_an_addition_with_dedup_killed_at_disk_operations_leaves_the_old_or_the_new_version(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    seen = kill_loop(tmp_path, tiny_tokenizer, "add", "7", '{"dedup": "exact"}')
    assert len(seen) > 15


RAY = pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")])


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(120))


@pytest.fixture(params=["local", RAY])
def pool(request: pytest.FixtureRequest) -> LocalRunner | RayRunner:
    if request.param == "local":
        return LocalRunner(2)
    request.getfixturevalue("ray_cluster")
    return RayRunner(2)


def test_02_the_output_after_a_worker_died_twice_is_identical(
    pool: LocalRunner | RayRunner, lines: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    log, out = io.StringIO(), tmp_path / "out"
    make_dataset([lines], tiny_tokenizer, tmp_path / "whole", shard_tokens=500)
    dying = Dying(pool, tmp_path, 2)
    made = make_dataset([lines], tiny_tokenizer, out, shard_tokens=500, runner=dying, log=log)
    died = "a worker died (SIGKILL"
    if isinstance(pool, RayRunner):
        died = "a Ray worker died (WorkerCrashedError) on a.jsonl"
    assert log.getvalue().count(died) == 2
    assert digests(out) == digests(tmp_path / "whole")
    assert made.now(Count.DOCUMENTS) == 120  # the lost work is not counted twice


def test_02_an_input_that_kills_every_worker_is_named_and_the_rest_is_kept(
    pool: LocalRunner | RayRunner, lines: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out, dying = tmp_path / "out", Dying(pool, tmp_path, 99)
    with pytest.raises(ResourceError, match="3 times") as caught:
        make_dataset([lines], tiny_tokenizer, out, shard_tokens=500, runner=dying)
    assert caught.value.where == "a.jsonl"
    if isinstance(pool, LocalRunner):
        assert "GiB" in caught.value.what  # its peak memory
    again = make_dataset([lines], tiny_tokenizer, out, shard_tokens=500)
    assert again.kept_shards > 0
    assert (out / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("slurm")
def test_02_a_killed_node_and_a_preempted_job_cost_the_tasks_they_had(
    slurm: Cluster, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text * 100 for text in texts(700)])
    out, options = tmp_path / "out", {"shard_tokens": 250_000, "holdout": "1/8"}
    make_dataset([source], tiny_tokenizer, tmp_path / "whole", **options)
    words = ("--shard-tokens", 250_000, "--holdout", "1/8", "--encoder", "hf")
    parent = subprocess.Popen(
        arguments(
            *("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", out),
            *(*words, "--runner", "slurm", "--workers", 3),
        ),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_elements(slurm, parent)
    element = ""
    while element not in (elements := running(slurm)):  # one that works, and has not ended since
        array, element = wait_for_work(out, parent).split("-")[1:]
    slurm.kill_node(elements.pop(element))
    kept = {path: path.stat().st_mtime_ns for path in out.glob("shard-*.json")}
    others = [other for other, node in elements.items() if node in slurm.live_nodes()]
    if others:
        slurm.run("scontrol", "requeue", f"{array}_{others[0]}")
    said, _ = parent.communicate()
    assert parent.returncode == 0, said
    assert digests(out) == digests(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert others, "nothing was left to pre-empt"


def running(slurm: Cluster) -> dict[str, str]:
    """Return element -> node of the array."""
    lines = slurm.run("squeue", "-hrt", "running", "-o", "%K %N").splitlines()
    return dict(line.split() for line in lines)


def wait_for_elements(slurm: Cluster, parent: subprocess.Popen[str]) -> None:
    """Return when elements are at work on both nodes."""
    while len(set(running(slurm).values())) < len(NODES):
        assert parent.poll() is None, parent.communicate()[0]


def wait_for_work(out: Path, parent: subprocess.Popen[str]) -> str:
    """Return the name of the first worker that has a task in hand."""

    def working() -> str | None:
        for folder in out.glob(".worker-*~*"):
            found = re.match(r"\.worker-(slurm-\d+-\d+)~", folder.name)
            if found and any(file.stat().st_size for file in folder.iterdir()):
                return found[1]
        assert parent.poll() is None, parent.communicate()[0]
        return None

    return wait_until(working, "a worker with a task in hand")
