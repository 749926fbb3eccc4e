"""Row 59: one rank's parameters differ from those of its replicas: found, named, nothing saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.runs import build_trainer, group_world
from torch.distributed.tensor import DTensor

from olm_data.errors import ValidationError
from olm_train.callbacks.base import Callback
from olm_train.extensions.monitors.replica_checker import digests, odd_ranks


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
