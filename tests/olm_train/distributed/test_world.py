"""Ranks meet, agree and wait for each other; who may train into a folder, and requests to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.command import environment
from support.ports import free_port
from torch import nn

from olm_data.errors import ConflictError, ResourceError, UsageError, ValidationError
from olm_train.distributed import world as module
from olm_train.distributed.agreement import require_agreement
from olm_train.distributed.holding import LeasePolicy, RunLock
from olm_train.distributed.preempt import (
    CANCELLED,
    LEASE_LOST,
    SLURM_END,
    TIME_LIMIT,
    Preempted,
    Preemption,
    seconds_left,
)
from olm_train.distributed.waiting import (
    CommConfig,
    RanksLostError,
    RankWatchdog,
    broke_off,
    numbers,
)
from olm_train.distributed.world import World, check_in, meets_on_loopback

RANK = """
import os, sys
from datetime import timedelta
from olm_train.distributed.world import World
world = World.start(timeout=timedelta(seconds=600))
mine = {os.readlink(f"/proc/self/fd/{n}")[8:-1] for n in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{n}") and "socket:[" in os.readlink(f"/proc/self/fd/{n}")}
found = []
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(table).read().splitlines()[1:]:
        parts = line.split()
        if parts[3] == "0A" and parts[9] in mine:
            found.append(parts[1].partition(":")[0])
world.barrier()
print("LISTENS", world.rank, *found)
world.stop()
"""
LOOPBACK = "0100007F"  # 127.0.0.1 as the kernel writes it


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_ranks_of_one_machine_listen_on_loopback_alone() -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    extra = {name: "" for name in os.environ if name.startswith("GLOO_")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={k: v for k, v in environment(extra).items() if v}
            | place
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    for rank, text in enumerate(said):
        words = text.partition("LISTENS ")[2].split()
        assert words[0] == str(rank)
        assert set(words[1:]) == {LOOPBACK}, text


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_without_a_place_is_refused_before_anything_is_opened(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} of {size}"):
        check_in(rank, size, timedelta(seconds=1))


@pytest.mark.usefixtures("place")
def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(ResourceError, match=r"2 of 3 ranks did not come within .*: 1, 2"):
        check_in(0, 3, timedelta(seconds=2))


@pytest.mark.usefixtures("place")
def test_alone_it_is_there_at_once() -> None:
    store = check_in(0, 1, timedelta(seconds=600))
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("others", [0, 3])
def test_a_meeting_place_that_is_gone_replaces_no_reason(others: int) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guest = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    met = dist.PrefixStore("check-in 0", guest)
    del host
    for _ in range(3):
        module._leave(met, 1, others)


@pytest.mark.parametrize(
    ("address", "loopback"), [("127.0.0.1", True), ("localhost", True), ("10.0.0.1", False)]
)
def test_an_address_of_this_machine_alone_is_known(
    address: str, loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    assert meets_on_loopback() == loopback


LOCK = "a" * 64


class Ranks:
    """Ranks that say what each was told when the last one is asked."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def gather(self, mine: Any) -> list[Any]:
        self.told.append(mine)
        return self.told


def agree(*configs: dict[str, Any]) -> None:
    world = Ranks()
    for config in configs:
        require_agreement(cast("World", world), LOCK, config)


def test_every_field_is_compared_and_no_order_of_them() -> None:
    agree({"a": {"b": 1.5}, "c": [1]}, {"c": [1], "a": {"b": 1.5}})
    for other in ({"a": {"b": 1.25}, "c": [1]}, {"a.b": 1.5, "c": [1.0]}):
        with pytest.raises(ValidationError, match=r"configuration: rank 0: .*, rank 1: "):
            agree({"a": {"b": 1.5}, "c": [1]}, other)


@given(st.sets(st.integers(0, 30), min_size=1))
def test_numbers_name_each_rank_once(them: set[int]) -> None:
    word, _, spans = numbers("rank", sorted(them)).partition(" ")
    assert word == ("ranks" if len(them) > 1 else "rank")
    named = []
    for span in spans.split(", "):
        first, _, last = span.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(them)


def test_only_errors_of_communication_are_taken_for_lost_ranks() -> None:
    assert broke_off(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert broke_off(RuntimeError("NCCL communicator was aborted"))
    assert not broke_off(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match=r"^gloo"), RankWatchdog(World(), nn.Module(), timeout=1):
        raise RuntimeError("gloo")  # alone nobody can be lost


@pytest.mark.parametrize("name", ["init_timeout_seconds", "train_timeout_seconds"])
@pytest.mark.parametrize("value", [0, -1.0, 1e9])
def test_a_wait_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError) as refusal:
        CommConfig(**{name: value})
    assert f"{name} is above 0 and at most 10,000,000" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gloo] Timed out waiting 1000ms for recv operation", "timed out waiting for other ranks"),
        ("[gloo] Connection closed by peer [127.0.0.1]:1", "lost its connection to other ranks"),
    ],
)
def test_a_connection_that_broke_is_not_called_a_wait(text: str, says: str) -> None:
    world = World(rank=1, size=2)
    with (
        pytest.raises(RanksLostError, match=f"rank 1 {says}") as caught,
        RankWatchdog(world, nn.Linear(1, 1), timeout=1.0),
    ):
        raise RuntimeError(text)
    assert caught.value.exit_code == 5


def test_the_first_signal_is_a_flag_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Preemption() as preemption:
        assert preemption.ask() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)  # a launcher forwards what it got itself
        request = preemption.ask()
        assert preemption.asked == request.code == signal.SIGUSR1
        assert preemption.ask() is preemption.request is request
    assert signal.getsignal(signal.SIGUSR1) == before


def test_it_may_be_entered_twice() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        with preemption:
            pass
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_lost_lease_goes_before_who_cancels_and_that_before_the_time_limit() -> None:
    preemption = Preemption()
    preemption.limit_time(100.0, 200.0)
    assert preemption.asked == TIME_LIMIT
    preemption.cancel("somebody", "")
    assert preemption.asked == CANCELLED
    preemption.lost = lambda: True
    assert preemption.asked == LEASE_LOST


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 75, "SIGTERM at step 3"),
        (signal.SIGINT, 130, "SIGINT at step 3"),
        (TIME_LIMIT, 75, "the time limit at step 3"),
        (CANCELLED, 75, "my_rule (enough) at step 3"),
    ],
)
def test_the_exit_code_says_whether_to_run_it_again(number: int, code: int, said: str) -> None:
    preemption = Preemption()
    if number == CANCELLED:
        preemption.cancel("my_rule", "enough")
        preemption.cancel("another", "too late")
    elif number == TIME_LIMIT:
        preemption.limit_time(100.0, 200.0)
    else:
        preemption.received = number
    request = preemption.ask()
    stopped = Preempted(request, 3)
    assert (stopped.exit_code, str(stopped)) == (code, said)


def test_the_limit_of_a_slurm_job_is_in_its_environment() -> None:
    assert seconds_left(12.5, {}) == 12.5
    end, before = int(time.time()) + 1000, time.time()
    left = seconds_left("slurm", {SLURM_END: str(end)})
    assert end - time.time() <= left <= end - before
    with pytest.raises(UsageError, match="SLURM_JOB_END_TIME"):
        seconds_left("slurm", {})


def holding(folder: Path, work_dir: Path | None = None) -> RunLock:
    return RunLock(str(folder), work_dir or folder, World(), LeasePolicy(), print)


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with holding(tmp_path) as held:
        held.check()
        assert not held.lost
        with pytest.raises(ConflictError, match="another process trains into this folder"):
            holding(tmp_path).__enter__()
    with holding(tmp_path):
        pass


def test_another_work_dir_is_held_too_and_given_back_where_it_is_refused(tmp_path: Path) -> None:
    first, second, logs = (tmp_path / name for name in ("first", "second", "logs"))
    with holding(first, logs):
        with pytest.raises(ConflictError):
            holding(second, logs).__enter__()
        with holding(second):  # it was not kept
            pass


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_time_without_a_sign_of_life_has_limits(seconds: float) -> None:
    with pytest.raises(UsageError, match="takeover_seconds is at"):
        LeasePolicy(takeover_seconds=seconds)


def test_a_run_does_not_write_over_something_else(tmp_path: Path) -> None:
    for kind, files in {
        "a dataset": {"manifest.json": '{"format": "olm-dataset"}'},
        "a checkpoint": {"manifest.json": '{"format": "olm-checkpoint"}'},
        "a model": {"config.json": "{}", "model.safetensors": ""},
    }.items():
        folder = tmp_path / kind
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        with pytest.raises(ConflictError, match=f"the save folder is {kind}"):
            holding(folder).__enter__()
        assert {path.name for path in folder.iterdir()} == {*files}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")  # of one that was killed before a step
    for name in ("run", "new", "."):
        with holding(tmp_path / name):
            pass
