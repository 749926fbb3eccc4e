"""Moments in bfloat16: right on average, the same on every copy, half the memory, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runs import build_trainer
from support.training import ROWS, build, digest, train

from olm_train.optim.adamw import AdamConfig, AdamWConfig, SkipStepAdamWConfig
from olm_train.optim.base import OptimConfig
from olm_train.optim.dion import DionConfig
from olm_train.optim.half import round_by_chance
from olm_train.optim.lion import LionConfig, SkipStepLionConfig
from olm_train.optim.muon import MuonConfig
from olm_train.stability.gate import take_step

CONFIGS: dict[str, tuple[type[OptimConfig], float]] = {
    "adamw": (AdamWConfig, 5e-3),
    "adam": (AdamConfig, 5e-3),
    "skip_step_adamw": (SkipStepAdamWConfig, 5e-3),
    "lion": (LionConfig, 2e-3),
    "skip_step_lion": (SkipStepLionConfig, 2e-3),
    "muon": (MuonConfig, 1e-2),
    "dion": (DionConfig, 1e-2),
}


def config(name: str, dtype: str, **options: Any) -> OptimConfig:
    kind, rate = CONFIGS[name]
    return kind(lr=rate, dtype=dtype, **options)  # type: ignore[call-arg]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(value=st.floats(-(2.0**127), 2.0**127, width=32), seed=st.integers(0, 2**31))
def test_a_number_becomes_one_of_its_two_neighbours(value: float, seed: int) -> None:
    exact = torch.full((64,), value)
    found = torch.empty(64, dtype=torch.bfloat16)
    round_by_chance(exact, found, generator(seed))
    below = (exact.view(torch.int32) & -1 << 16).view(torch.float32)  # towards zero
    above = ((exact.view(torch.int32) & -1 << 16) + (1 << 16)).view(torch.float32)
    assert ((found.float() == below) | (found.float() == above)).all()
    if (below == exact).all():
        assert (found.float() == exact).all()


def test_the_mean_is_the_number_and_to_the_nearest_it_would_not_be() -> None:
    exact = torch.full((200_000,), 1.0 + 1 / 1024)  # neighbours: 1 and 1 + 1/128
    found = torch.empty(exact.shape, dtype=torch.bfloat16)
    round_by_chance(exact, found, generator(1))
    share = float((found > 1).double().mean())
    assert share == pytest.approx(1 / 8, abs=0.005)
    assert (exact.bfloat16() == 1).all()


def test_a_mean_of_slow_decay_follows_what_the_nearest_would_lose() -> None:
    """beta2 = 0.999 moves a second moment by a thousandth of it: below half a step of bfloat16."""
    ends = {}
    for dtype in ("float32", "bfloat16"):
        parameter = torch.nn.Parameter(torch.zeros(4096))
        model = torch.nn.Module()
        model.weight = parameter
        optimizer = AdamWConfig(lr=0.0, betas=(0.9, 0.999), dtype=dtype).build(model)  # type: ignore[arg-type]
        for _ in range(400):
            parameter.grad = torch.ones(4096)
            optimizer.step()
        ends[dtype] = optimizer.state[parameter]["exp_avg_sq"].float()
    torch.testing.assert_close(ends["bfloat16"].mean(), ends["float32"].mean(), rtol=0.01, atol=0)
    nearest = torch.tensor(0.0, dtype=torch.bfloat16)
    for _ in range(400):
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    assert nearest < 0.9 * ends["float32"].mean()


@pytest.mark.parametrize("name", CONFIGS)
def test_it_learns_as_with_moments_in_float32(name: str) -> None:
    runs = {
        dtype: train(build(optim=config(name, dtype)), [ROWS]) for dtype in ("float32", "bfloat16")
    }
    assert runs["float32"].losses[-1] < 0.95 * runs["float32"].losses[0]
    assert runs["bfloat16"].losses[-1] == pytest.approx(runs["float32"].losses[-1], rel=0.02)


@pytest.mark.parametrize("name", CONFIGS)
def test_moments_are_bfloat16_and_the_same_each_time(name: str) -> None:
    modules = [build(optim=config(name, "bfloat16")) for _ in range(2)]
    for module in modules:
        train(module, [ROWS], steps=[1, 2])
    first, second = (module.state_dict()["optim"] for module in modules)
    moments = [key for key in first if key.rpartition(".")[2] in ("exp_avg", "exp_avg_sq")]
    moments += [key for key in first if key.endswith("momentum_buffer")]
    assert moments
    for key in moments:
        assert first[key].dtype == torch.bfloat16
        assert torch.equal(first[key], second[key])
        assert first[key].count_nonzero() > 0


@pytest.mark.parametrize("name", ["adamw", "skip_step_adamw", "skip_step_lion"])
def test_a_step_that_is_left_out_changes_neither_weights_nor_moments(name: str) -> None:
    module = build(optim=config(name, "bfloat16"))
    train(module, [ROWS], steps=[1])
    before = {
        key: value.clone()
        for part in module.state_dict().values()
        for key, value in part.items()
        if torch.is_tensor(value) and not key.startswith("skip_step")
    }
    for parameter in module.model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    take_step(module.optimizer, torch.ones(()))
    after = {k: v for part in module.state_dict().values() for k, v in part.items()}
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []


@pytest.mark.parametrize("name", ["muon", "dion"])
def test_a_resumed_run_has_the_same_bits(name: str, tiny_mixture: Path, tmp_path: Path) -> None:
    def run(folder: str, steps: int) -> str:
        trainer = build_trainer(
            tiny_mixture,
            tmp_path / folder,
            f"--train_module.optim={{name: {name}, dtype: bfloat16}}",
            stop=steps,
            quiet=True,
        )
        trainer.fit()
        state = trainer.train_module.state_dict()
        return digest({k: v for part in state.values() for k, v in part.items()})

    run("parts", 2)
    assert run("parts", 4) == run("whole", 4)
