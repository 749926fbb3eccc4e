"""The look at the nodes before the first step: it names the one that is not as the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.distributed import run_ranks
from support.runs import group_world

from olm_data.errors import ResourceError
from olm_train.extensions.launch.config import PreflightConfig
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
