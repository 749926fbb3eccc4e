"""Before the first step: what each node has, and how fast it is; names those that are not as the
others.

    rank 0 of each node -> Facts --.
    ranks of each pair of nodes: matmul, all-reduce, broadcast, all-gather, reduce-scatter
                                   '--judge--> preflight.json, problems and warnings by node

A collective over all nodes is as slow as the slowest of them and names none. So nodes are measured
in pairs, each with the next one and with the one before, and the better of the two counts: beside a
slow node a good one has another good pair. Of two nodes alone neither is named for its network.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from olm_data.bounded_json import decode_object
from olm_data.command import reported, run_process, say
from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.counts import counted
from olm_data.errors import ResourceError
from olm_data.storage.disk import make_folder, write_durable
from olm_train.distributed.preempt import Preemption
from olm_train.distributed.world import World, local_rank
from olm_train.extensions.launch.config import PreflightConfig

PREFLIGHT = "preflight.json"
REPEATS = 3
SIDE = 1024
"""Rows of the matrices that are multiplied."""

Collective = Callable[[torch.Tensor, dist.ProcessGroup], Any]


def _all_gather(data: torch.Tensor, group: dist.ProcessGroup) -> None:
    whole = data.new_empty(len(data) * group.size())
    dist.all_gather_single(whole, data, group=group)


def _reduce_scatter(data: torch.Tensor, group: dist.ProcessGroup) -> None:
    size = group.size()
    dist.reduce_scatter_single(data.new_empty(len(data)), data.repeat(size), group=group)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": lambda data, group: dist.all_reduce(data, group=group),
    "broadcast": lambda data, group: dist.broadcast(data, group_src=0, group=group),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has.

    Attributes:
        name: of the node.
        gpus: that torch sees.
        disk_gb, shm_gb: 10^9 bytes free where the logs are, and in `/dev/shm`.
        open_files: that a process may have.
        clock: seconds since 1970 at the same moment on all nodes.
        code: digest of the snapshot.
    """

    name: str
    gpus: int
    disk_gb: float
    shm_gb: float
    open_files: int
    clock: float
    code: str


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """What `preflight.json` says.

    Attributes:
        nodes: in the order of their numbers.
        rates: by what was measured, of each node: TFLOP/s of `matmul`, GB/s of the exchanges.
        problems, slow: by node, what is wrong with it.
    """

    nodes: list[Facts]
    rates: dict[str, list[float]]
    problems: dict[str, list[str]]
    slow: dict[str, list[str]]
    version: int = 1


def facts(name: str, code: str, work_dir: str, clock: Callable[[], float] = time.time) -> Facts:
    """Return what this node has."""
    return Facts(
        name=name,
        gpus=torch.cuda.device_count(),
        disk_gb=shutil.disk_usage(work_dir).free / 1e9,
        shm_gb=shutil.disk_usage("/dev/shm").free / 1e9,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        clock=clock(),
        code=code,
    )


def problems(nodes: Sequence[Facts], gpus: int, wanted: PreflightConfig) -> dict[str, list[str]]:
    """Return by node what it lacks, or has otherwise than the others; none is slow here.

    Args:
        gpus: that each node must have.
    """
    median = statistics.median(node.clock for node in nodes)
    code = statistics.mode(node.code for node in nodes)
    found = dict[str, list[str]]()
    for node in nodes:
        off = node.clock - median
        checks = [
            (node.gpus < gpus, f"{counted(node.gpus, 'GPU')}, not {gpus}"),
            (node.disk_gb < wanted.disk_gb, f"{node.disk_gb:.3g} GB of disk free"),
            (node.shm_gb < wanted.shm_gb, f"{node.shm_gb:.3g} GB of /dev/shm free"),
            (node.open_files < wanted.open_files, f"ulimit -n is {node.open_files}"),
            (abs(off) > wanted.clock_seconds, f"its clock is {off:+.3g} s off"),
            (node.code != code, f"its code is {node.code}, that of others {code}"),
        ]
        if wrong := [text for bad, text in checks if bad]:
            found[node.name] = wrong
    return found


def slow(
    names: Sequence[str], rates: dict[str, list[float]], wanted: PreflightConfig
) -> dict[str, list[str]]:
    """Return by node what it is slow at: below a share of the median of all."""
    found = dict[str, list[str]]()
    for what, each in rates.items():
        median = statistics.median(each)
        for name, rate in zip(names, each, strict=True):
            if rate < wanted.slow_share * median:
                unit = "TFLOP/s" if what == "matmul" else "GB/s"
                found.setdefault(name, []).append(
                    f"{what}: {rate:.3g} {unit}, the median is {median:.3g}"
                )
    return found


def pairs(nodes: int) -> list[tuple[int, int]]:
    """Return pairs of nodes, each with the next one, that can be measured one after the other.

    First those of even and odd numbers: most nodes are in one of two pairs at a time.
    """
    ring = [(n, (n + 1) % nodes) for n in range(nodes if nodes > 2 else 1)]
    return [*ring[::2], *ring[1::2]]


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of an action, after one that opens connections."""
    taken = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def rates_of(
    world: World, ranks: int, megabytes: int, collectives: Mapping[str, Collective] = COLLECTIVES
) -> dict[str, list[float]]:
    """Return by what is measured the rate of each node; every rank calls it.

    Args:
        ranks: of a node; they are numbered one after another.
        collectives: by name; each gets this rank's data and a group.
    """
    nodes, device = world.size // ranks, world.device
    square = torch.ones(SIDE, SIDE, device=device)
    best = {"matmul": 2 * SIDE**3 / _seconds(lambda: square @ square, device) / 1e12}
    data = torch.ones(megabytes * 250_000, device=device)
    groups = list[tuple[list[int], dist.ProcessGroup]]()
    for pair in pairs(nodes) if world.size > 1 else []:
        members = sorted({node * ranks + n for node in pair for n in range(ranks)})
        groups.append((members, dist.new_group(members)))  # every rank makes every group
    for _, group in (each for each in groups if world.rank in each[0]):
        for name, collective in collectives.items():
            seconds = _seconds(partial(collective, data, group), device)
            best[name] = max(best.get(name, 0.0), data.nbytes / seconds / 1e9)
    gathered = world.gather(best)
    by_node = [gathered[n * ranks : (n + 1) * ranks] for n in range(nodes)]
    return {name: [min(rank[name] for rank in node) for node in by_node] for name in best}


def look(world: World, here: Facts, gpus: int, wanted: PreflightConfig, ranks: int) -> Preflight:
    """Return what was found of all nodes; every rank calls it, with the facts of its node.

    Where a node has a problem, nothing is measured.
    """
    nodes = world.gather(here)[::ranks]
    wrong = problems(nodes, gpus, wanted)
    rates = {} if wrong else rates_of(world, ranks, wanted.megabytes)
    names = [node.name for node in nodes]
    return Preflight(nodes=nodes, rates=rates, problems=wrong, slow=slow(names, rates, wanted))


def report(found: Preflight, refuse_slow: bool) -> str:
    """Return what is to be said, "" if nothing.

    Raises:
        ResourceError: a node cannot take part.
    """
    bad = {**found.problems}
    for name, what in found.slow.items() if refuse_slow else ():
        bad[name] = [*bad.get(name, []), *what]
    lines = "".join(f"\n    {name}: {'; '.join(what)}" for name, what in bad.items())
    if bad:
        raise ResourceError(
            f"{counted(len(bad), 'node')} of {len(found.nodes):,} cannot take part:{lines}",
            why=f"see {PREFLIGHT}",
            fix=f"leave them out (Slurm: `exclude: {','.join(bad)}`), or change `preflight`",
        )
    said = [f"{name} ({'; '.join(what)})" for name, what in found.slow.items()]
    return f"warning: slow: {', '.join(said)}" if said else ""


def main(arguments: Sequence[str]) -> int:
    """Look at all nodes; return the exit code. Arguments: as JSON, see `agent._start`."""
    given = decode_object(arguments[0].encode())
    wanted = parse(PreflightConfig, Values(given["wanted"], file="preflight"))
    number, work_dir = local_rank(), given["work_dir"]
    has_gpu = number < torch.cuda.device_count()  # a node that lacks one is named below
    with Preemption(at_once=True):
        world = World.start(device=torch.device("cuda", number) if has_gpu else torch.device("cpu"))
        make_folder(work_dir)
        world.barrier()  # then the clocks are read
        here = facts(given["name"], given["digest"], work_dir)
        found = look(world, here, given["gpus"], wanted, int(os.environ["LOCAL_WORLD_SIZE"]))
        if world.main:
            write_durable(Path(work_dir) / PREFLIGHT, msgspec.json.encode(found))
        try:
            said = report(found, wanted.refuse_slow)
        except ResourceError as error:  # the same on all ranks, and said once
            if world.main:
                raise
            return error.exit_code
        if world.main and said:
            say(said)
        world.barrier()
        world.stop()
    return 0


def run(arguments: Sequence[str]) -> NoReturn:
    """Run the command; end the process with its exit code."""
    with reported(debug=False):
        sys.exit(main(arguments))


if __name__ == "__main__":
    run_process(lambda: run(sys.argv[1:]))
