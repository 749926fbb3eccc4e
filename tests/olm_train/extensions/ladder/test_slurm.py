"""`olm-train ladder run --to slurm` on a real Slurm: a trunk is cancelled, and submitted again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.launched import write_project
from support.polling import wait_until
from support.runs import environment, metrics
from support.slurm import Cluster

from olm_data.run_log.log import read_starts

from .test_plan import write_ladder

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]


def ladder(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `olm-train ladder` in a project."""
    command = [sys.executable, "-m", "olm_train", "ladder", *words]
    done = subprocess.run(
        command, env=environment(), cwd=project, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done


def test_what_failed_is_submitted_again_and_what_has_finished_is_not(
    slurm: Cluster, tiny_mixture: Path, tmp_path: Path
) -> None:
    launch = write_project(tmp_path / "my project", tiny_mixture, preflight={"enabled": False})
    project = launch.parent
    write_ladder(project, tiny_mixture)
    train = yaml.safe_load((project / "train.yaml").read_text())
    train["trainer"]["callbacks"]["said"] = {"name": "said:Said", "wait": 0.5}
    (project / "train.yaml").write_text(yaml.safe_dump(train))
    points = json.loads(ladder(project, "plan", "ladder.yaml", "--json").stdout)["points"]
    results = project / "ladder" / "ladder.jsonl"
    results.parent.mkdir()
    trained = (point | {"flops": point["whole_flops"], "loss": 3.0} for point in points[3:])
    results.write_text("".join(json.dumps(point) + "\n" for point in trained))
    trunk, *forks = (project / "ladder" / point["name"] for point in points[:3])

    def submit() -> str:
        return ladder(project, "run", "--to", "slurm", "ladder.yaml", "launch.yaml").stderr

    slurm.run("scontrol", "update", "PartitionName=debug", "State=DOWN")  # jobs wait
    try:
        assert "3 jobs submitted, 0 in the queue before" in submit()
        waiting = slurm.run("squeue", "-h", "-o", "%E %o").splitlines()
        assert sum(line.startswith("afterok:") for line in waiting) == 2, waiting
        assert "0 jobs submitted, 3 in the queue before" in submit()
    finally:
        slurm.run("scontrol", "update", "PartitionName=debug", "State=UP")
    wait_until(lambda: (trunk / "metrics.jsonl").exists() and len(metrics(trunk)) > 1, "a step")
    (job,) = (
        line.split()[0]
        for line in slurm.run("squeue", "-h", "-o", "%i %o").splitlines()
        if trunk.name in line
    )
    slurm.run("scancel", job)
    wait_until(lambda: not slurm.run("squeue", "-h"), "the end of the trunk, and so of its forks")
    assert not any(fork.exists() for fork in forks)
    assert len(results.read_text().splitlines()) == 6

    assert "3 jobs submitted, 0 in the queue before" in submit()
    wait_until(lambda: not slurm.run("squeue", "-h"), "the end of all jobs")
    logs = "".join(path.read_text() for path in results.parent.glob("*.log"))
    assert f"all 9 points are trained: {results}" in submit(), logs
    assert [line["step"] for line in metrics(trunk) if "rows" in line] == list(range(1, 17)), logs
    assert len(read_starts(trunk)) == 2
    assert [metrics(fork)[0]["step"] for fork in forks] == [7, 4]
    assert [json.loads(line)["name"] for line in results.read_text().splitlines()[6:]] == [
        trunk.name, *(fork.name for fork in forks)
    ]  # fmt: skip
    assert ladder(project, "fit", "ladder.yaml", "--json").stdout
