"""Run a function on N gloo ranks on this machine's CPU, in real processes.

    run_ranks(check, 2, argument) -> [result of rank 0, result of rank 1]

Processes come from a fork server that has imported torch and what a training run needs once, so a
run costs well under a second after the first. It is not the server of `olm_data`'s workers, which
has other modules. A rank that fails surfaces with its traceback; ranks that hang are killed.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # the first step of an optimizer imports it
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "support.runs",
        "support.training",
    ]
)


@contextmanager
def rank_server() -> Iterator[ForkServerContext]:
    """In the block, processes that a context starts are forked with the modules of a run."""
    paths = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)  # the server leaves out what it does not find
        _SERVER.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process)
        yield multiprocessing.get_context("forkserver")


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 600.0
) -> list[Any]:
    """Call `function(*arguments)` on each rank of a fresh gloo group.

    Args:
        function: importable by name in another process; `torch.distributed` is initialised.
        world_size: number of ranks.
        arguments: picklable.
        timeout: seconds for all of it.

    Returns:
        Picklable results, by rank.

    Raises:
        AssertionError: a rank failed, with its traceback, or did not finish.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, rank_server() as context:
        processes = [
            context.Process(
                target=_rank_main,
                args=(folder, rank, world_size, timeout, dict(os.environ), function, arguments),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        outcomes = [_outcome(Path(folder), rank) for rank in range(world_size)]
    failures = [
        f"rank {rank} (exit code {process.exitcode}):\n{error}"
        for rank, (process, (error, _)) in enumerate(zip(processes, outcomes, strict=True))
        if error
    ]
    if failures:
        raise AssertionError("\n".join(failures))
    return [result for _, result in outcomes]


def _wait(processes: list[BaseProcess], timeout: float) -> None:
    """Until all ended, one failed (the others would wait for it in a collective) or time is up."""
    deadline = time.monotonic() + timeout
    while running := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes) or time.monotonic() > deadline:
            return
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=1.0)


def _outcome(folder: Path, rank: int) -> tuple[str | None, Any]:
    path = folder / f"rank-{rank}"
    if not path.exists():
        return "no result: killed, hung, or crashed", None
    error, result = pickle.loads(path.read_bytes())
    return error, result


def _share_device(gloo: Any) -> None:
    """Give all groups of this process one device. Its thread wakes a hundred times a second, and a
    process that builds layout after layout would have hundreds of them, at 0.6 % of a core each."""
    create, device = gloo.__init__, gloo.create_default_device()

    def created(group: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        create(group, store, rank, size, options)

    gloo.__init__ = created


def _rank_main(
    folder: str,
    rank: int,
    world_size: int,
    timeout: float,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.clear()  # that of the time when the first ranks were started
    os.environ.update(environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    _share_device(dist.ProcessGroupGloo)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        outcome = (None, function(*arguments))
    except BaseException:
        outcome = (traceback.format_exc(), None)
    partial = Path(folder) / f"rank-{rank}.partial"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(Path(folder) / f"rank-{rank}")
    if outcome[0]:
        os._exit(1)  # without the goodbyes of a group whose other ranks may be stuck
    dist.destroy_process_group()
