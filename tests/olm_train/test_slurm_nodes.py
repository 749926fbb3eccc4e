"""pipelines/slurm/train.sbatch on a real Slurm: ranks on two nodes, and the queue in between."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from support.distributed import run_ranks
from support.polling import wait_until
from support.runs import build_trainer, group_world, metrics, write_config
from support.slurm import Cluster


def train_whole_and_in_part(lock: Path, whole: Path, part: Path) -> None:
    world = group_world()
    ddp, stop = "--train_module.dp_config.name=ddp", "--trainer.hard_stop={value: 6, unit: steps}"
    build_trainer(lock, whole, ddp, world=world).fit()
    build_trainer(lock, part, ddp, stop, world=world).fit()


@pytest.mark.slow
@pytest.mark.xdist_group("slurm")
def test_a_run_moves_to_two_nodes_and_through_a_time_limit_without_a_changed_bit(
    slurm: Cluster,
    tiny_mixture: Path,
    tmp_path: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    run_ranks(train_whole_and_in_part, 2, tiny_mixture, whole, part)
    config = write_config(tmp_path / "train.yaml", tiny_mixture, part)

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    script = shutil.copy(repository / "pipelines" / "slurm" / "train.sbatch", tmp_path)
    options = (str(config), "--parallel=auto")  # takes ddp, and says for how many machines
    # Four minutes are less than the margin of the script: the job stops before it takes a step.
    job = slurm.run("sbatch", "--parsable", "--time=4", script, *options).strip()
    log = tmp_path / f"olm-train-{job}.log"

    def queued_again() -> bool:
        state = slurm.run("squeue", "-h", "-j", job, "-o", "%T")
        assert state, log.read_text()
        return state.strip() == "PENDING" and log.exists() and "queued again" in log.read_text()

    wait_until(queued_again, "the job in the queue again")
    assert "stopped by the time limit at step 6" in log.read_text()
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_until(lambda: not slurm.run("squeue", "-h", "-j", job), "the job's end")

    said = log.read_text()
    assert said.count("2 ranks on 2 machines") == 2, said
    steps, undisturbed = ([m for m in metrics(run) if "rows" in m] for run in (part, whole))
    assert [m["step"] for m in steps] == list(range(1, 25)), said
    assert steps == undisturbed
