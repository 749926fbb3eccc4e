"""The agent of a node, the look before the first step, and the contract of exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.distributed import run_ranks
from support.ports import free_port
from support.runs import group_world

from olm_data import errors
from olm_data.errors import ResourceError
from olm_train.extensions.launch.agent import Agent, newest_step, node_name
from olm_train.extensions.launch.config import PreflightConfig
from olm_train.extensions.launch.exit_codes import (
    CONTRACT,
    FINAL,
    Retry,
    ends_with,
    exit_code,
    first,
)
from olm_train.extensions.launch.preflight import (
    COLLECTIVES,
    Facts,
    Preflight,
    facts,
    look,
    pairs,
    problems,
    rates_of,
    report,
    slow,
)

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


def test_each_error_of_the_house_has_a_place() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    codes = {each.exit_code for each in kinds if issubclass(each, errors.OlmError)}
    assert codes == set(range(1, 8))
    assert codes <= {*CONTRACT}


@pytest.mark.parametrize("gained", [False, True])
@pytest.mark.parametrize(
    ("code", "retry"),
    [
        (75, Retry.always),
        *((code, Retry.never) for code in (2, 3, 4, 7, 130)),
        *((code, Retry.gained) for code in (1, 5, 6, 134, 137, 143)),
    ],
)
def test_a_job_ends_with_75_if_it_is_to_be_started_again_and_else_with_its_code(
    code: int, retry: Retry, gained: bool
) -> None:
    again = retry == Retry.always or (retry == Retry.gained and gained)
    assert ends_with(code, gained=gained) == (75 if again else code)


def test_a_finished_job_is_finished_and_final_codes_are_all_others() -> None:
    assert ends_with(0, gained=True) == 0
    assert sorted(FINAL) == [1, 2, 3, 4, 5, 6, 7, 130]


def test_of_ranks_that_fail_at_once_the_first_is_not_one_that_lost_another() -> None:
    assert first({0: 5, 1: 5, 2: 3}) == 2
    assert first({1: 5, 3: 5}) == 1


def test_a_signal_is_a_code_as_a_shell_gives_it() -> None:
    assert (exit_code(-9), exit_code(-15), exit_code(3)) == (137, 143, 3)


def test_the_page_has_the_same_table(repository: Path) -> None:
    page = (repository / "docs/how-to/launch.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (\w+) \|$", page, re.MULTILINE)
    assert rows == [(str(code), what, retry) for code, (what, retry) in CONTRACT.items()]


GOOD = Facts(name="n0", gpus=8, disk_gb=100, shm_gb=50, open_files=65536, clock=1e9, code="abc")


WANTED = PreflightConfig()


LATE = ("all_reduce", "all_gather")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": 7}, "7 GPUs, not 8"),
        ({"disk_gb": 2.5}, "2.5 GB of disk free"),
        ({"shm_gb": 0.064}, "0.064 GB of /dev/shm free"),
        ({"open_files": 1024}, "ulimit -n is 1024"),
        ({"clock": 1e9 - 30}, "its clock is -30 s off"),
        ({"code": "xyz"}, "its code is xyz, that of others abc"),
    ],
)
def test_the_node_that_lacks_something_is_named_and_no_other(
    change: dict[str, Any], says: str
) -> None:
    nodes = [msgspec.structs.replace(GOOD, name=f"n{n}") for n in range(4)]
    assert problems(nodes, 8, WANTED) == {}
    nodes[2] = msgspec.structs.replace(nodes[2], **change)
    assert problems(nodes, 8, WANTED) == {"n2": [says]}


def test_a_slow_node_is_told_and_refused_only_if_that_is_asked_for() -> None:
    names = [f"n{n}" for n in range(4)]
    rates = {"matmul": [10.0, 9.5, 10.2, 9.9], "broadcast": [40.0, 41.0, 12.0, 39.0]}
    found = slow(names, rates, WANTED)
    assert found == {"n2": ["broadcast: 12 GB/s, the median is 39.5"]}
    assert slow(names, rates, PreflightConfig(slow_share=0.2)) == {}
    nodes = [msgspec.structs.replace(GOOD, name=name) for name in names]
    whole = Preflight(nodes=nodes, rates=rates, problems={}, slow=found)
    assert "n2 (broadcast: 12 GB/s" in report(whole, refuse_slow=False)
    with pytest.raises(ResourceError, match="1 node of 4 cannot take part") as refused:
        report(whole, refuse_slow=True)
    assert "exclude: n2" in str(refused.value.fix)
    assert report(msgspec.structs.replace(whole, slow={}), refuse_slow=True) == ""


@pytest.mark.parametrize("nodes", range(2, 12))
def test_each_node_is_in_two_pairs_and_each_pair_is_measured_once(nodes: int) -> None:
    found = [frozenset(pair) for pair in pairs(nodes)]
    assert len(found) == len({*found})
    for node in range(nodes):
        assert sum(node in pair for pair in found) == min(2, nodes - 1)


def late(collective: Callable[..., Any], seconds: float, data: Any, group: Any) -> None:
    time.sleep(seconds)  # what a slow link does to it
    collective(data, group)


def measure(slow_rank: int, ranks: int) -> tuple[dict[str, list[float]], float]:
    """Rates where one rank is late at each exchange, and what one exchange is checked against."""
    world = group_world()
    seconds = 1.0 if world.rank == slow_rank else 0.0
    collectives = {name: partial(late, COLLECTIVES[name], seconds) for name in LATE}
    rates = rates_of(world, ranks, 1, collectives)
    data = torch.full((2,), float(world.rank + 1))
    for name in ("all_gather", "reduce_scatter", "broadcast", "all_reduce"):
        COLLECTIVES[name](data, dist.group.WORLD)  # type: ignore[arg-type]
    return rates, float(data[0])


@pytest.mark.slow
def test_a_node_with_a_slow_network_is_named_among_four() -> None:
    outcomes = run_ranks(measure, 4, 2, 1)
    rates, total = outcomes[0]
    assert all(found == outcomes[0] for found in outcomes)
    assert total == 4  # rank 0's value everywhere after the broadcast, then summed
    network = {name: rates[name] for name in LATE}
    found = slow(["n0", "n1", "n2", "n3"], network, PreflightConfig(slow_share=0.2))
    assert {*found} == {"n2"}
    assert len(found["n2"]) == len(LATE)


def look_with_a_broken_node(work_dir: str) -> Preflight:
    world = group_world()
    node = world.rank // 2
    code, ahead = ("other", 3600.0) if node == 1 else ("same", 0.0)
    here = facts(f"n{node}", code, work_dir, lambda: time.time() + ahead)
    lenient = PreflightConfig(disk_gb=0, shm_gb=0, open_files=1, megabytes=1, clock_seconds=600)
    return look(world, here, 0, lenient, 2)


def test_a_node_with_other_code_and_clock_is_named_and_nothing_is_measured(
    tmp_path: Path,
) -> None:
    found = run_ranks(look_with_a_broken_node, 6, str(tmp_path))[0]
    assert [node.name for node in found.nodes] == ["n0", "n1", "n2"]
    assert {*found.problems} == {"n1"}
    clock, code = found.problems["n1"]
    assert clock.startswith("its clock is +3")
    assert code == "its code is other, that of others same"
    assert found.rates == {}
