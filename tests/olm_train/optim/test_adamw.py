"""AdamW, Adam and Lion, with moments in fp32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.model_options import drawn, steps_of_chance
from support.runs import build_trainer
from support.training import ROWS, build, digest, train

from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.optim.adamw import AdamConfig, AdamWConfig, SkipStepAdamWConfig
from olm_train.optim.base import OptimConfig
from olm_train.optim.dion import DionConfig
from olm_train.optim.half import round_by_chance
from olm_train.optim.lion import LionConfig, SkipStepLionConfig
from olm_train.optim.muon import MuonConfig
from olm_train.stability.gate import take_step

CONFIG = DecoderConfig(vocab_size=50, d_model=32, n_layers=1, n_heads=4)


def built(**options: object) -> tuple[Decoder, torch.optim.AdamW]:
    model = drawn(CONFIG)
    return model, AdamWConfig(**options).build(model)  # type: ignore[arg-type]


def stepped(**options: object) -> dict[str, torch.Tensor]:
    model, optimizer = built(**options)
    steps_of_chance(model, optimizer, 3)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_fused_is_the_default_and_equals_the_plain_loop() -> None:
    assert built()[1].defaults["fused"] is True
    assert not built(fused=False)[1].defaults["fused"]
    fused, plain = stepped(), stepped(fused=False)
    for name in fused:
        torch.testing.assert_close(fused[name], plain[name], rtol=1e-5, atol=1e-6)


def test_state_is_complete_and_zero_before_the_first_step() -> None:
    model, optimizer = built()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert all((value == 0).all() for value in state.values())
        assert state["exp_avg"].shape == parameter.shape


def test_state_made_in_advance_steps_like_torchs_own() -> None:
    ours, model = stepped(), drawn(CONFIG)
    groups = built()[1].param_groups
    decays = [{n for g in groups if g["weight_decay"] == d for n in g["names"]} for d in (0.1, 0)]
    parameters = dict(model.named_parameters())
    theirs = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in sorted(names)], "weight_decay": decay}
            for names, decay in zip(decays, (0.1, 0.0), strict=True)
        ],
        lr=3e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    steps_of_chance(model, theirs, 3)
    assert all(torch.equal(ours[name], parameter) for name, parameter in parameters.items())


@pytest.mark.parametrize(
    ("option", "value"),
    [("weight_decay", 0.5), ("lr", 1e-3), ("eps", 1e-2), ("betas", (0.8, 0.9)),
     ("decay_embeddings", True)],
)  # fmt: skip
def test_each_option_has_an_effect(option: str, value: Any) -> None:
    plain, changed = stepped(), stepped(**{option: value})
    differing = {name for name in plain if not torch.equal(plain[name], changed[name])}
    if option == "weight_decay":
        assert differing == {n for n, p in plain.items() if p.ndim == 2} - {"embeddings.weight"}
    elif option == "decay_embeddings":
        assert differing == {"embeddings.weight"}
    else:
        assert differing


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        *((AdamWConfig, option, value) for option, value in (
            ("lr", -1.0), ("betas", (0.9, 1.0)), ("betas", (0.9,)), ("eps", 0.0),
            ("weight_decay", -0.1),
        )),
        *((MuonConfig, option, value) for option, value in (
            ("mu", 1.0), ("eps", 0.0), ("adjust_lr", "other"),
        )),
        *((DionConfig, option, value) for option, value in (
            ("rank_fraction", 0.0), ("rank_fraction", 1.5), ("mu", 1.0),
        )),
        *((SkipStepAdamWConfig, option, value) for option, value in (
            ("rolling_interval_length", 3), ("sigma_factor", 0.0), ("fused", False), ("lr", -1.0),
        )),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(kind: Any, option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option):
        kind(**{option: value})


def test_a_step_is_the_papers() -> None:
    model = torch.nn.Linear(5, 3, bias=False)
    optimizer = LionConfig(lr=0.01, betas=(0.9, 0.98), weight_decay=0.1).build(model)
    weight, mean = model.weight.detach().clone(), torch.zeros(3, 5)
    for seed in range(3):
        gradient = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        model.weight.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * mean + 0.1 * gradient)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * update
        mean = 0.98 * mean + 0.02 * gradient
        torch.testing.assert_close(model.weight.detach(), weight)
        torch.testing.assert_close(optimizer.state[model.weight]["exp_avg"], mean)


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
