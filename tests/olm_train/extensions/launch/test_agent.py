"""The agent of a node: one code for all nodes, that of the rank that failed first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from support.ports import free_port

from olm_data.errors import ResourceError
from olm_train.extensions.launch.agent import Agent, newest_step, node_name

SOON = timedelta(seconds=60)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """Two nodes of two ranks each, in this process, that have met."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    agents = [Agent(node=n, nodes=2, ranks=2, margin=60) for n in range(2)]
    for agent in agents:
        agent.meet(SOON)
    return agents


def rank(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time\nrank = int(os.environ['RANK'])\n{code}"]


def supervised(
    nodes: list[Agent], command: list[str], failed: tuple[int, int] = (0, 0)
) -> set[int]:
    """Run a command on all nodes; return what they end with."""
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(n.supervise, command, failed=f) for n, f in zip(nodes, failed, strict=True)
        ]
        return {run.result() for run in runs}


@pytest.mark.parametrize("code", [1, 7, 75, 130])
def test_all_nodes_end_with_the_code_of_the_rank_that_failed_first(
    nodes: list[Agent], code: int
) -> None:
    others = "time.sleep(600)" if code != 75 else "time.sleep(1); sys.exit(75)"
    found = supervised(nodes, rank(f"if rank == 3: sys.exit({code})\n{others}"))
    assert found == {code}


def test_a_rank_that_is_killed_counts_as_a_shell_counts_it(nodes: list[Agent]) -> None:
    assert supervised(nodes, rank("if rank == 2: os.kill(os.getpid(), 9)\ntime.sleep(600)")) == {
        137
    }


def test_ranks_get_the_environment_of_torchrun(nodes: list[Agent], tmp_path: Path) -> None:
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")
    says = f"open(r'{tmp_path}/' + str(rank), 'w').write(' '.join(os.environ[n] for n in {names}))"
    assert supervised(nodes, rank(says)) == {0}
    port = os.environ["MASTER_PORT"]
    found = [(tmp_path / str(n)).read_text() for n in range(4)]
    assert found == [f"4 {n % 2} 2 {n // 2} {port}" for n in range(4)]


def test_a_node_that_cannot_begin_ends_all(nodes: list[Agent]) -> None:
    assert supervised(nodes, rank("time.sleep(600)"), (0, 3)) == {3}


def test_one_command_follows_another_at_the_same_store(nodes: list[Agent]) -> None:
    assert supervised(nodes, rank("")) == {0}
    assert supervised(nodes, rank("sys.exit(4)")) == {4}
    assert supervised(nodes, rank("")) == {0}


def test_the_first_node_decides_and_all_hear_of_a_signal(nodes: list[Agent]) -> None:
    nodes[1].signalled = signal.SIGTERM
    supervised(nodes, rank("time.sleep(1)\nsys.exit(75)"))
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(node.agree, 5, gained=node.node == 0) for node in nodes]
    assert {end.result() for end in ends} == {(75, True)}


def test_a_node_whose_first_node_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(ResourceError, match="node 1 cannot reach the meeting place"):
        Agent(node=1, nodes=2, ranks=1, margin=1).meet(timedelta(seconds=1))


def test_a_node_is_called_what_its_scheduler_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert node_name() == "n7"


def test_a_folder_without_checkpoints_is_at_step_0(tmp_path: Path) -> None:
    assert newest_step(str(tmp_path / "none")) == 0
    (tmp_path / "step00000005").mkdir()
    assert newest_step(str(tmp_path)) == 0


def agent(*words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "olm_train.extensions.launch.agent", *words]
    return subprocess.Popen(
        command, env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )


def test_the_program_refuses_a_snapshot_that_is_gone_with_its_code(tmp_path: Path) -> None:
    process = agent(str(tmp_path / "none"), "--digest=x", "--meet=127.0.0.1:0")
    assert "the snapshot of the job is gone" in process.communicate(timeout=1200)[1]
    assert process.returncode == 3


def test_a_job_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    process = agent(str(tmp_path), "--digest=x", "--meet=x:1", "--node-from=NOT_SET_HERE")
    assert re.search("NOT_SET_HERE is not the number", process.communicate(timeout=1200)[1])
    assert process.returncode == 2
