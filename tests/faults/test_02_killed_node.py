"""FAULTS row 2 on clusters: a killed node, a pre-empted job or a killed Ray worker costs one task.

On Slurm everything on a node is killed in the middle of a task, its daemons included, and another
element is queued again as pre-emption does. On Ray the worker process is killed.
"""

from __future__ import annotations

import io
import re
import subprocess
from pathlib import Path

import pytest
from support.command import arguments, environment
from support.killed_worker import Dying
from support.polling import wait_until
from support.slurm import NODES, Cluster
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.errors import ResourceError
from olm_data.extensions.ray.runner import RayRunner
from olm_data.runners.base import Count


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


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_02_the_output_after_ray_workers_died_is_identical(
    ray_cluster: None, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source, log = write_jsonl(tmp_path / "a.jsonl", texts(120)), io.StringIO()
    make_dataset([source], tiny_tokenizer, tmp_path / "whole", shard_tokens=500)
    dying = Dying(RayRunner(2), tmp_path, 2)
    out = tmp_path / "out"
    made = make_dataset([source], tiny_tokenizer, out, shard_tokens=500, runner=dying, log=log)
    assert log.getvalue().count("a Ray worker died (WorkerCrashedError) on a.jsonl") == 2
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert made.now(Count.DOCUMENTS) == 120  # the lost work is not counted twice


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_02_an_input_that_kills_every_ray_worker_is_named_and_the_rest_is_kept(
    ray_cluster: None, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(120))
    out, dying = tmp_path / "out", Dying(RayRunner(2), tmp_path, 99)
    with pytest.raises(ResourceError, match="3 times") as caught:
        make_dataset([source], tiny_tokenizer, out, shard_tokens=500, runner=dying)
    assert caught.value.where == "a.jsonl"
    again = make_dataset([source], tiny_tokenizer, tmp_path / "out", shard_tokens=500)
    assert again.kept_shards > 0
