"""The processes of a run: this rank, its device, and small exchanges between the ranks.

    torchrun's environment -> World.start() -> World -> World.stop()

At world size 1 there is no process group and every exchange is the identity. Two gloo groups of
their own carry the agreement on preemption and the exchanges of checkpoints, so that neither can
mix with the collectives of a training step.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from olm_data.errors import OlmError, ResourceError, UsageError
from olm_data.storage.plaintext_warning import is_loopback

FAREWELL = timedelta(seconds=10)
"""How long the rank that hosts the store stays for the others to read why they are refused."""

_OUTCOME, _ALL_HERE = "outcome", b"all here"


def check_in(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Wait for all ranks of the run; return the store they met at.

    Args:
        rank, size: what this process was told.
        timeout: the longest wait for the others.

    Raises:
        UsageError: a rank is there twice, has no place in the run, or was told another world size.
        ResourceError: ranks did not come in time (their numbers are named), or the meeting place
            cannot be reached.
    """
    if not 0 <= rank < size:
        raise UsageError(
            f"this process was told to be rank {rank} of {size}",
            where="RANK, WORLD_SIZE",
            fix="number the processes from 0; torchrun does so",
        )
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = meeting_place(f"rank {rank}", timeout, hosts=hosts)
    try:
        return _meet(store, rank, size, timeout, hosts=hosts)
    except dist.DistNetworkError as error:
        raise ResourceError(
            f"rank {rank} lost the meeting place {_place()}",
            why=str(error).split("\n")[0],
            fix="look at the message of rank 0, which holds it",
        ) from error


def meeting_place(who: str, timeout: timedelta, *, hosts: bool) -> dist.Store:
    """Return the store at `MASTER_ADDR` and `MASTER_PORT`; nobody else is waited for.

    Args:
        who: what messages call this process, such as "rank 3".
        timeout: the longest wait for the one that hosts it.
        hosts: whether this process does.

    Raises:
        ResourceError: it cannot be opened, or not be reached in time.
    """
    try:
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_on_loopback() if hosts else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        raise ResourceError(
            f"{who} cannot {'open' if hosts else 'reach'} the meeting place {_place()}",
            where="MASTER_ADDR, MASTER_PORT",
            why=str(error).split("\n")[0],
            fix=f"{who} may run twice, or another run may use the port: choose a free one"
            if hosts
            else f"start {who.split()[0]} 0 on that machine, and look at its message",
        ) from error


def _place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def meets_on_loopback() -> bool:
    """Whether the ranks meet at an address that no other machine reaches."""
    return is_loopback(os.environ.get("MASTER_ADDR", ""))


def _on_loopback() -> int | None:
    """Return an open socket for the store where it is to be on loopback; by itself torch's store
    listens on every interface."""
    if not meets_on_loopback():
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024).detach()


def _meet(
    store: dist.Store, rank: int, size: int, timeout: timedelta, *, hosts: bool
) -> dist.Store:
    # torchrun starts the ranks of a failed run again, at the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    met = dist.PrefixStore(f"check-in {attempt}", store)
    number = met.add("processes", 1)
    problem = _arrive(met, rank, size)
    if problem:
        met.compare_set(_OUTCOME, "", problem)
    try:
        met.wait([_OUTCOME], timeout)
    except dist.DistStoreError as error:
        missing = [str(r) for r in range(size) if not met.check([f"rank {r}"])]
        _leave(met, number, met.add("processes", 0) if hosts else 0)
        shown = ", ".join(missing[:16]) + (", ..." if len(missing) > 16 else "")
        raise ResourceError(
            f"{len(missing)} of {size} ranks did not come within {timeout.total_seconds():g} s: "
            f"{shown}",
            fix="look at the messages of these ranks, and whether their machines reach this one",
        ) from error
    outcome = bytes(met.get(_OUTCOME))
    if not problem and outcome == _ALL_HERE:
        return dist.PrefixStore(f"run {attempt}", store)
    _leave(met, number, max(size, met.add("processes", 0)) if hosts else 0)
    raise UsageError(
        problem or outcome.decode(),
        where="RANK, WORLD_SIZE",
        why="ranks would train on the same rows, or wait for each other for ever",
        fix="start each rank once, all with the same world size; torchrun does so",
    )


def _arrive(met: dist.Store, rank: int, size: int) -> str | None:
    """Sign in; return what is wrong with this rank."""
    told = bytes(met.compare_set("size", "", str(size))).decode()
    if told != str(size):
        return f"rank {rank} was told of {size} ranks, another one of {told}"
    if met.add(f"rank {rank}", 1) > 1:
        return f"rank {rank} was started twice"
    if met.add("here", 1) == size:
        met.compare_set(_OUTCOME, "", _ALL_HERE.decode())
    return None


def _leave(met: dist.Store, number: int, others: int) -> None:
    """Say that process `number` knows why it must go; wait until processes 1..`others` know, too.

    Whoever hosts the store waits, or nobody could read it. One that died will not say so. The store
    may be gone as soon as the last process has said it: what happens here changes no reason.
    """
    with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
        met.set(f"left {number}", "")
        if others:
            met.wait([f"left {n}" for n in range(1, others + 1)], FAREWELL)


Result = TypeVar("Result")

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
START_TIMEOUT = timedelta(minutes=30)
"""Machines of a large job come up minutes apart."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the processes of the run.

    Attributes:
        rank: 0-based number of this process.
        size: number of processes.
        device: where this process computes.
        neighbours: ranks of this machine; None where only this one is known.
        control_group: gloo group of the agreement on preemption, None at size 1.
        exchange_group: gloo group of the other small exchanges, None at size 1.
        store: key-value store of the ranks, None at size 1.
        sharers: ranks, numbered one after another, that read the same rows and share their tokens.
        stages: as many equal parts of the ranks, numbered one after another, that have other
            layers: the first rank of each reads the same rows, and so on.
        groups: other groups that carry exchanges of a step.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    neighbours: range | None = None
    control_group: dist.ProcessGroup | None = None
    exchange_group: dist.ProcessGroup | None = None
    store: dist.Store | None = None
    sharers: int = 1
    stages: int = 1
    groups: tuple[dist.ProcessGroup, ...] = ()

    @classmethod
    def start(
        cls, *, device: torch.device | None = None, timeout: timedelta = START_TIMEOUT
    ) -> World:
        """Join the run described by torchrun's environment; alone without it.

        CUDA and nccl where this machine has a CUDA device, else CPU and gloo.

        Args:
            device: where to compute instead.
            timeout: the longest wait for the other ranks, here and in each exchange.

        Raises:
            UsageError: there are CUDA devices, but fewer than local processes; or the ranks are not
                each there once.
            ResourceError: ranks did not come in time.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        device = device or local_device(local_rank())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if size == 1:
            return cls(device=device)
        if meets_on_loopback():  # gloo listens at the address of the host's name, unless told
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        store = check_in(rank, size, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("groups", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        return cls(
            rank=rank,
            size=size,
            device=device,
            neighbours=_neighbours(rank, size),
            control_group=dist.new_group(backend="gloo", timeout=timeout),
            exchange_group=dist.new_group(backend="gloo", timeout=timeout),
            store=dist.PrefixStore("ranks", store),
        )

    @property
    def main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes the files of the run."""
        return self.rank == 0

    @property
    def reader(self) -> int:
        """Which of the `readers` parts of each step this rank reads."""
        return self.rank % (self.size // self.stages) // self.sharers

    @property
    def readers(self) -> int:
        """Number of equal parts of each step that ranks read."""
        return self.size // self.stages // self.sharers

    @property
    def near_readers(self) -> range | None:
        """The parts of each step that ranks of this machine read; None where it is not known."""
        if (near := self.neighbours) is None:
            return None
        of_stage = self.size // self.stages
        if near.start // of_stage != (near.stop - 1) // of_stage:
            return range(self.readers)  # of several stages; perhaps not all, of the first and last
        first, last = near.start % of_stage, (near.stop - 1) % of_stage
        return range(first // self.sharers, last // self.sharers + 1)

    @property
    def speaks(self) -> bool:
        """Whether this rank is, of those that read the same rows, the one that writes what all of
        them know."""
        return self.rank % self.sharers == 0 and self.rank < self.size // self.stages

    @property
    def nodes(self) -> int:
        """Number of machines, where each has as many ranks as this one; 1 where unknown."""
        return self.size // len(self.neighbours) if self.neighbours else 1

    def stop(self) -> None:
        """Leave the run."""
        if self.size > 1:
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.exchange_group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank."""
        return [value] if self.size == 1 else gathered(value, self.exchange_group)

    def any(self, condition: bool) -> bool:
        """Whether it holds on some rank; the same answer on every rank."""
        if self.size > 1:
            flag = torch.tensor([condition], dtype=torch.int32)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.exchange_group)
            return bool(flag[0])
        return condition

    def on_main(self, action: Callable[[], Result]) -> Result:
        """Run `action` on rank 0 while the others wait; return its result on every rank.

        Raises:
            OlmError, OSError: what `action` raised, on every rank.
        """
        if self.size == 1:
            return action()
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = action()
            except (OlmError, OSError) as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.exchange_group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def on_each(self, action: Callable[[], Result]) -> list[Result]:
        """Run `action` on every rank; return the results by rank, on every rank.

        Raises:
            OlmError, OSError: the first that `action` raised anywhere, on every rank.
        """
        result: Result | None = None
        failure: Exception | None = None
        try:
            result = action()
        except (OlmError, OSError) as error:
            failure = error
        outcomes = self.gather((result, failure))
        for _, failed in outcomes:
            if failed is not None:
                raise failed
        return [result for result, _ in outcomes]

    def from_main(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `tensor`, on this rank's device, on every rank; all have its shape."""
        if self.size > 1:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            dist.broadcast(tensor, src=0)
        return tensor

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over the ranks, the same bits on every rank."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor


def quiet_alone(world: World) -> None:
    """Before torch's distributed checkpoint: in a single process it warns that it is one."""
    if world.size == 1:
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def _neighbours(rank: int, size: int) -> range:
    """Return the ranks of this machine, which torchrun numbers one after another."""
    first = rank - local_rank()
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return range(max(0, first), min(size, first + count))


def local_rank() -> int:
    """Return the number of this process among those of its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_device(local_rank: int = 0) -> torch.device:
    """Return the device of a process of this machine: a CUDA device where there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {local_rank} has no CUDA device; there are {torch.cuda.device_count()}",
            where="torchrun --nproc-per-node",
            fix=f"use --nproc-per-node={torch.cuda.device_count()} or fewer",
        )
    return torch.device("cuda", local_rank)


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of the ranks of a group, in its order, on each of them; None: of all."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
