"""The ranks of a run find each other: each exactly once, all of one world size, or none goes on.

    MASTER_ADDR, MASTER_PORT -> TCP store -> "rank r is here" -> all here -> process group
                                               twice | another world size | not in time -> refused

torch's own rendezvous counts processes: with a rank started twice, or with one missing, it waits
until a timeout that names nobody.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from olm_data.errors import ResourceError, UsageError
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
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if not 0 <= rank < size:
        raise UsageError(
            f"this process was told to be rank {rank} of {size}",
            where="RANK, WORLD_SIZE",
            fix="number the processes from 0; torchrun does so",
        )
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store: dist.Store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=size,
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_on_loopback() if hosts else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        raise ResourceError(
            f"rank {rank} cannot open the meeting place {place}"
            if hosts
            else f"rank {rank} cannot reach the meeting place {place}",
            where="MASTER_ADDR, MASTER_PORT",
            why=str(error).split("\n")[0],
            fix="rank 0 may run twice, or another run may use the port: choose a free one"
            if hosts
            else "start rank 0 on that machine, and look at its message",
        ) from error
    try:
        return _meet(store, rank, size, timeout, hosts=hosts)
    except dist.DistNetworkError as error:
        raise ResourceError(
            f"rank {rank} lost the meeting place {place}",
            why=str(error).split("\n")[0],
            fix="look at the message of rank 0, which holds it",
        ) from error


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
        missing = [str(r) for r in range(size) if not met.check([_rank(r)])]
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
    if met.add(_rank(rank), 1) > 1:
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


def _rank(rank: int) -> str:
    return f"rank {rank}"
