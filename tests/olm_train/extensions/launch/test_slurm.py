"""`olm-train launch` of runs, here and on a real Slurm: two nodes, the queue, edited code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.distributed import run_ranks
from support.launched import launch, write_project
from support.polling import wait_until
from support.runs import build_trainer, group_world, metrics
from support.slurm import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]


def train_whole_and_in_part(lock: Path, whole: Path, part: Path) -> None:
    world = group_world()
    ddp, stop = "--train_module.dp_config.name=ddp", "--trainer.hard_stop={value: 6, unit: steps}"
    build_trainer(lock, whole, ddp, world=world).fit()
    build_trainer(lock, part, ddp, stop, world=world).fit()


def submitted(config: Path) -> tuple[str, Path]:
    """Submit a job; return its number and its log."""
    done = launch(config, "--to", "slurm")
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    return job, config.parent / f"tiny-{job}.log"


def test_a_queued_job_goes_on_with_its_own_code_without_a_changed_bit(
    slurm: Cluster, tiny_mixture: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    # Half an hour is less than the margin: the job stops before it takes a step.
    limit = {"slurm": {"options": {"time": 30}}, "margin": 2000}
    choose = ["--parallel=auto"]  # takes ddp, and says for how many machines
    config = write_project(project, tiny_mixture, nodes=2, options=choose, **limit)
    whole, part = tmp_path / "whole", project / "run"
    run_ranks(train_whole_and_in_part, 2, tiny_mixture, whole, part)

    job, log = submitted(config)

    def queued_again() -> bool:
        state = slurm.run("squeue", "-h", "-j", job, "-o", "%T")
        assert state, log.read_text()
        return state.strip() == "PENDING" and log.exists() and "queued again" in log.read_text()

    wait_until(queued_again, "the job in the queue again")
    assert "stopped by the time limit at step 6" in log.read_text()
    for name, old, new in (("said.py", "one", "two"), ("train.yaml", "lr: 0.01", "lr: 0.5")):
        text = (project / name).read_text()
        assert old in text
        (project / name).write_text(text.replace(old, new))
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_until(lambda: not slurm.run("squeue", "-h", "-j", job), "the job's end")

    said = log.read_text()
    assert said.count("2 ranks on 2 machines") == 2, said
    assert said.count("code one") == 4, said
    assert "code two" not in said
    steps, undisturbed = ([m for m in metrics(run) if "rows" in m] for run in (part, whole))
    assert [m["step"] for m in steps] == list(range(1, 25)), said
    assert steps == undisturbed


def test_a_job_whose_snapshot_was_changed_refuses_and_does_not_come_back(
    slurm: Cluster, tiny_mixture: Path, tmp_path: Path
) -> None:
    held = {"options": {"hold": None}}
    config = write_project(tmp_path / "project", tiny_mixture, nodes=2, slurm=held)
    job, log = submitted(config)
    (copy,) = (tmp_path / "snapshots").glob("*/code/*/said.py")
    copy.write_text(copy.read_text().replace("one", "two"))
    slurm.run("scontrol", "release", job)
    wait_until(lambda: not slurm.run("squeue", "-h", "-j", job), "the job's end")

    assert "the snapshot was changed: code/0-project/said.py" in log.read_text()
    assert not re.search("code (one|two)", log.read_text())
    assert re.search(r"ExitCode=3:0", slurm.run("scontrol", "show", "job", job))
    assert not (tmp_path / "project" / "run").exists()


def test_a_job_that_is_cancelled_saves_and_does_not_come_back(
    slurm: Cluster, tiny_mixture: Path, tmp_path: Path
) -> None:
    slow = ["--trainer.callbacks.said.wait=1.0"]
    config = write_project(tmp_path / "project", tiny_mixture, nodes=2, options=slow)
    job, log = submitted(config)
    run = tmp_path / "project" / "run"
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) > 1, "a step")
    slurm.run("scancel", job)
    wait_until(lambda: not slurm.run("squeue", "-h", "-j", job), "the job's end")

    said, state = log.read_text(), slurm.run("scontrol", "show", "job", job)
    assert "saved checkpoint" in said, said
    assert "JobState=CANCELLED" in state, state
    assert "Restarts=0" in state


def test_a_run_here_is_of_the_snapshot_and_says_so(tiny_mixture: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    config = write_project(project, tiny_mixture, ranks_per_node=2)
    done = launch(config, "--to", "local")
    assert done.returncode == 0, done.stderr
    assert "code one" in done.stderr
    digest = next((tmp_path / "snapshots").glob("*/snapshot.json")).parent.name
    run = project / "run"
    assert [m["step"] for m in metrics(run) if "rows" in m] == list(range(1, 25))
    assert json.loads((run / "environment.json").read_text())["code"] == digest
    environment = json.loads((run / "config.json").read_text())["trainer"]["callbacks"]
    assert environment["environment"]["snapshot"] == digest
    found = json.loads((run / "preflight.json").read_text())
    assert {*found["rates"]} == {
        "matmul", "all_reduce", "broadcast", "all_gather", "reduce_scatter",
    }  # fmt: skip
    assert all(rate > 0 for rates in found["rates"].values() for rate in rates)
    assert found["nodes"][0]["code"] == digest
