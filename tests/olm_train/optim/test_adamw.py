"""AdamW: fused equals plain, state exists before the first step, decay touches what it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.optim.adamw import AdamWConfig, SkipStepAdamWConfig
from olm_train.optim.dion import DionConfig
from olm_train.optim.muon import MuonConfig

CONFIG = DecoderConfig(vocab_size=50, d_model=32, n_layers=1, n_heads=4)


def built(**options: object) -> tuple[Decoder, torch.optim.AdamW]:
    model = Decoder(CONFIG)
    init_parameters(model, 0)
    return model, AdamWConfig(**options).build(model)  # type: ignore[arg-type]


def stepped(**options: object) -> dict[str, torch.Tensor]:
    model, optimizer = built(**options)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
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
    ours = stepped()
    model = Decoder(CONFIG)
    init_parameters(model, 0)
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
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        theirs.step()
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
