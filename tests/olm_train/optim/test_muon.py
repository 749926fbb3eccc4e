"""Muon: nearly orthogonal updates of the blocks' matrices, part by part; AdamW for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import MODEL, build

from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.base import OptimConfig
from olm_train.optim.dion import DionConfig
from olm_train.optim.groups import GroupOverride
from olm_train.optim.muon import Muon, MuonConfig, orthogonalise, scale


@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 2**32))
def test_singular_values_come_near_one(rows: int, columns: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    before = torch.linalg.svdvals(matrix)
    after = torch.linalg.svdvals(orthogonalise(matrix))
    assert after.max() < 1.3
    if before.min() > 0.05 * before.max():
        assert after.min() > 0.3
    assert orthogonalise(matrix).shape == matrix.shape


SHARED = (("mu", 0.5), ("adjust_lr", "none"), ("weight_decay", 0.5))
"""Options of both that orthogonalise."""


def stepped(config: OptimConfig) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    model = Decoder(MODEL)
    init_parameters(model, 0)
    optimizer = config.build(model)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, optimizer


def test_matrices_of_blocks_take_muon_and_all_else_adamw() -> None:
    muon, optimizer = stepped(MuonConfig(lr=1e-2))
    adamw, _ = stepped(AdamWConfig(lr=1e-2))
    same = {name for name in muon if torch.equal(muon[name], adamw[name])}
    matrices = {n for n, p in muon.items() if p.ndim == 2 and n.startswith("blocks.")}
    assert same == set(muon) - matrices
    assert isinstance(optimizer, Muon)
    keys = {tuple(sorted(state)) for state in optimizer.state.values()}
    assert keys == {("momentum_buffer",), ("exp_avg", "exp_avg_sq", "step")}


def test_queries_keys_and_values_are_orthogonal_each_by_itself() -> None:
    model = Decoder(MODEL)
    init_parameters(model, 0)
    linear = model.blocks[0].attention.w_qkv
    optimizer = MuonConfig(lr=1.0, weight_decay=0.0, adjust_lr="none", nesterov=False).build(model)
    before = linear.weight.detach().clone()
    linear.weight.grad = torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert len(linear.parts) == 3
    for part in (before - linear.weight.detach()).split(linear.parts):
        values = torch.linalg.svdvals(part)
        assert 0.5 < values.min() <= values.max() < 1.3


def test_the_matrices_of_each_expert_are_orthogonal_by_themselves() -> None:
    experts = {"name": "moe", "n_experts": 3, "top_k": 1, "hidden_size": 24}
    model = Decoder(MODEL.changed(feed_forward=experts))
    init_parameters(model, 0)
    layer = model.blocks[0].feed_forward
    optimizer = MuonConfig(lr=1.0, weight_decay=0.0, adjust_lr="none", nesterov=False).build(model)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for seed, parameter in enumerate(layer.parameters()):
        generator = torch.Generator().manual_seed(seed)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    assert "exp_avg" in optimizer.state[layer.router.weight]
    for name, parts in (("experts.w_gate_up", 2), ("experts.w_down", 1)):
        moved = (before[name] - layer.get_parameter(name).detach()).flatten(0, 1)
        matrices = moved.chunk(3 * parts)
        assert len(matrices) == 3 * parts
        for matrix in matrices:
            values = torch.linalg.svdvals(matrix)
            assert 0.5 < values.min() <= values.max() < 1.3


def test_scale_of_an_update() -> None:
    assert scale((64, 16), "none") == 1
    assert scale((64, 16), "spectral_norm") == 2
    assert scale((16, 64), "spectral_norm") == 1
    assert scale((64, 16), "rms_norm") == 0.2 * 8


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *((MuonConfig, {name: value}) for name, value in (("nesterov", False), ("lr", 1e-3))),
        (DionConfig, {"rank_fraction": 0.5}),
        *((kind, {name: value}) for kind in (MuonConfig, DionConfig) for name, value in SHARED),
    ],
)
def test_each_option_has_an_effect(kind: Any, option: dict[str, Any]) -> None:
    plain, _ = stepped(kind(lr=1e-2))
    changed, _ = stepped(kind(**{"lr": 1e-2, **option}))
    name = "blocks.0.feed_forward.w_down.weight"
    assert not torch.equal(plain[name], changed[name])


@pytest.mark.parametrize("kind", [MuonConfig, DionConfig])
def test_a_group_has_a_momentum_and_a_rate_of_its_own(kind: Any) -> None:
    override = GroupOverride(params=["blocks.0.*"], opts={"mu": 0.5, "lr": 0.0})
    weights, optimizer = stepped(kind(lr=1e-2, group_overrides=[override]))
    model = Decoder(MODEL)
    init_parameters(model, 0)
    before = dict(model.named_parameters())
    moved = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert moved == {name for name in weights if not name.startswith("blocks.0.")}
    assert {g["momentum"] for g in optimizer.param_groups if "parts" in g} == {0.5, 0.95}


def test_a_model_in_bfloat16_has_nearly_the_same_updates_from_products_in_bfloat16() -> None:
    config, updates = MuonConfig(lr=1.0, weight_decay=0.0), []
    for param_dtype in ("float32", "bfloat16"):
        module = build(optim=config, param_dtype=param_dtype)
        weight = module.model.blocks[0].feed_forward.w_down.weight
        before = weight.detach().clone()
        weight.grad = torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
        module.optimizer.step()
        updates.append(before - weight.detach())
    plain, reduced = updates
    assert reduced.dtype is torch.float32
    assert not torch.equal(plain, reduced)
    assert (plain - reduced).norm() < 0.03 * plain.norm()
