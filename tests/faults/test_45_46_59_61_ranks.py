"""FAULTS rows 45, 46, 59, 61: ranks that are missing, disagree, differ or hang."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import rank_server, run_ranks
from support.forked import python
from support.ports import free_port
from support.runs import REPOSITORY, build_trainer, environment, group_world
from torch.distributed.tensor import DTensor

from olm_data.errors import OlmError, ValidationError
from olm_train.callbacks.base import Callback
from olm_train.distributed.agreement import require_agreement
from olm_train.distributed.world import World
from olm_train.extensions.monitors.replica_checker import digests, odd_ranks


def join(environment: dict[str, str], seconds: float, ready: Any, ends: Any) -> None:
    """Start one rank with the others; put (what it was told, what it said) on the queue."""
    os.environ.update(environment)
    ready.wait(600)
    told = environment["RANK"], environment["WORLD_SIZE"]
    try:
        world = World.start(timeout=timedelta(seconds=seconds))
    except OlmError as error:
        ends.put((told, f"{error.exit_code} {error}"))
        return
    ends.put((told, f"together {world.gather(world.rank)}"))
    dist.barrier()
    world.stop()


def outcomes(ranks: Sequence[tuple[int, int]], seconds: float) -> list[tuple[Any, str]]:
    """Start processes told to be (rank, world size); return what each said, sorted."""
    port = free_port()
    with rank_server() as context:
        ends: Any = context.Queue()
        ready = context.Barrier(len(ranks))
        processes = []
        for rank, size in ranks:
            environment = {"RANK": str(rank), "WORLD_SIZE": str(size)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            processes.append(context.Process(target=join, args=(environment, seconds, ready, ends)))
            processes[-1].start()
    said = [ends.get(timeout=600) for _ in ranks]
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    return sorted(said)


@pytest.mark.slow
def test_45_ranks_that_are_all_there_once_go_on() -> None:
    said = outcomes([(rank, 4) for rank in range(4)], 600)
    assert [text for _, text in said] == ["together [0, 1, 2, 3]"] * 4


@pytest.mark.slow
def test_45_a_doubled_rank_is_refused_by_all() -> None:
    said = outcomes([(0, 4), (1, 4), (1, 4), (2, 4)], 600)
    assert [text.split("\n")[0] for _, text in said] == ["2 rank 1 was started twice"] * 4


@pytest.mark.slow
def test_45_another_world_size_is_refused_by_all() -> None:
    said = outcomes([(0, 3), (1, 3), (2, 4)], 600)
    assert {text[0] for _, text in said} == {"2"}
    assert all("was told of" in text and "ranks, another one of" in text for _, text in said)


@pytest.mark.slow
def test_45_a_missing_rank_is_named_by_all() -> None:
    said = outcomes([(0, 4), (1, 4), (2, 4)], 15)
    assert {text.split("\n")[0] for _, text in said} == {
        "5 1 of 4 ranks did not come within 15 s: 3"
    }


def test_45_a_rank_outside_of_the_run_is_refused_at_once() -> None:
    [(_, text)] = outcomes([(4, 4)], 600)
    assert text.startswith("2 this process was told to be rank 4 of 4")


CONFIG = {"seed": 1, "train_module": {"optim": {"lr": 3e-4, "betas": [0.9, 0.95]}}}


def disagree(kind: str) -> str:
    """Meet the others with something different on rank 2; return the error."""
    world = group_world()
    odd = world.rank == 2
    config = {**CONFIG, "seed": 2} if odd and kind == "seed" else CONFIG
    try:
        require_agreement(world, "b" * 64 if odd and kind == "lock" else "a" * 64, config)
    except ValidationError as error:
        return f"{error.exit_code} {error}"
    return ""


def disagree_all() -> list[str]:
    return [disagree(kind) for kind in ("same", "seed", "lock")]


@pytest.mark.slow
def test_46_every_rank_refuses_and_names_who_differs_in_what() -> None:
    first, *others = run_ranks(disagree_all, 4)
    assert all(other == first for other in others)
    same, seed, lock = first
    assert same == ""
    assert {text[0] for text in (seed, lock)} == {"3"}
    assert "configuration: rank 0: " in seed
    assert "rank 2: " in seed
    assert "mixture lock: rank 0: aaaaaaaaaaaa, rank 2: bbbbbbbbbbbb" in lock


class FlippedBit(Callback):
    """Changes the lowest bit of one weight of one rank after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def pre_step(self, batches: Any) -> None:
        if (self.trainer.world.rank, self.trainer.step) == (self.rank, self.step):
            weight = self.trainer.train_module.model.norm.weight.data
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.view(torch.int32)[0] ^= 1


def check(lock: Path, folder: Path, name: str, odd: int | None) -> str:
    callbacks = {} if odd is None else {"flip": FlippedBit(odd, 6)}
    options = [
        f"--train_module.dp_config.name={name}",
        "--trainer.callbacks.replica_checker.interval=3",
        "--trainer.hard_stop={value: 12, unit: steps}",
        "--train_module.rank_microbatch_size=64",
    ]
    if name == "hsdp":
        options.append("--train_module.dp_config.num_replicas=2")
    trainer = build_trainer(lock, folder, *options, callbacks=callbacks, world=group_world())
    try:
        trainer.fit()
    except ValidationError as error:
        return str(error)
    return f"step {trainer.step}"


def checks(lock: Path, folder: Path) -> list[str]:
    return [
        check(lock, folder / "ddp", "ddp", odd=2),
        check(lock, folder / "hsdp", "hsdp", odd=3),
        check(lock, folder / "good", "hsdp", odd=None),
    ]


@pytest.mark.slow
def test_59_the_odd_rank_is_named_before_anything_of_it_is_saved(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    first, *others = run_ranks(checks, 4, tiny_mixture, tmp_path)
    assert all(other == first for other in others)
    ddp, hsdp, good = first
    assert "step 9: ranks that should hold the same tensors do not" in ddp
    assert "norm.weight: rank 2 differ" in ddp
    assert "norm.weight: ranks 1, 3 differ" in hsdp  # two replicas: nobody knows which is right
    assert good == "step 12"
    assert sorted(path.name for path in (tmp_path / "ddp").glob("step*")) == ["step00000006"]


@given(st.data())
def test_59_one_changed_bit_of_any_tensor_is_found(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int64: torch.int64}
    tensor = torch.arange(1, 6).to(dtype)
    changed = tensor.clone()
    bit = data.draw(st.integers(0, tensor.element_size() * 8 - 2))
    changed.view(integers[dtype])[data.draw(st.integers(0, 4))] ^= 1 << bit
    same, other = digests({"x": tensor}), digests({"x": changed})
    assert odd_ranks([same, same, same]) == []
    assert odd_ranks([same, other, same]) == ["x: rank 1 differ from the others"]
    assert odd_ranks([same, other]) == ["x: ranks 0, 1 differ"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--train_module.cp_config={degree: 2}"],
        [
            "--train_module.ep_config={degree: 2}",
            "--model.feed_forward={name: moe, n_experts: 4, top_k: 2, hidden_size: 16}",
        ],
    ],
)
def test_61_all_ranks_end_and_say_where_each_was(
    tiny_mixture: Path, tmp_path: Path, options: list[str]
) -> None:
    port = str(free_port())
    script = REPOSITORY / "tests" / "support" / "hung_rank.py"
    ranks = [
        subprocess.Popen(
            [python(), str(script), str(tiny_mixture), str(tmp_path), *options],
            env={
                **environment(),
                "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert "wait_for_ever" in told[1]  # the stack of the one that hangs
    report = next(text for text in told if "has not moved for 20 seconds" in text)
    assert "rank 1: step 2 done, in the step after it" in report
    assert "rank 0: step " in report
