"""What is tuned at one size stays right at others: the tables' numbers, and their promises."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.model_options import drawn
from support.runs import build_trainer
from support.training import MODEL
from torch import Tensor, nn

from olm_data.errors import UsageError, ValidationError
from olm_train.model.block import BlockConfig
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import initial_std
from olm_train.model.parametrization import TABLES, BaseConfig
from olm_train.optim.adamw import AdamConfig, AdamWConfig
from olm_train.optim.base import OptimConfig
from olm_train.optim.dion import DionConfig
from olm_train.optim.given import NamedOptim
from olm_train.optim.lion import LionConfig
from olm_train.optim.muon import MuonConfig

SCALED = [name for name in TABLES if name != "sp"]
BASE = {"d_model": 64, "n_layers": 2}
OURS = DecoderConfig(
    vocab_size=50, d_model=256, n_layers=4, n_heads=16, parametrization="completep",
    base=BaseConfig(d_model=64, n_layers=2),
    attention={"qk_norm": "head", "bias": "all"}, norm={"name": "layer_norm", "bias": True},
    positions={"name": "learned", "max_positions": 8},
)  # fmt: skip
"""m_N = 4, m_L = 2, with a tensor of each role."""


def options(model: Decoder, optim: OptimConfig) -> dict[str, dict[str, Any]]:
    return {name: group for group in optim.build(model).param_groups for name in group["names"]}


def test_the_numbers_of_a_model_four_times_as_wide_and_twice_as_deep() -> None:
    """By hand, from Table 1 of arXiv 2505.01618 with alpha = 1: m_N = 4, m_L = 2."""
    model = Decoder(OURS, device="meta")
    found = options(model, AdamWConfig(lr=1.0, weight_decay=0.1, eps=1.0))
    expected = {  # rate, decay, eps
        "embeddings.weight": (1.0, 0.0, 1 / 4),
        "position_embeddings.weight": (1.0, 0.0, 1 / 4),
        "lm_head.weight": (1.0, 0.1, 1 / 4),
        "norm.weight": (1.0, 0.0, 1 / 4),
        "norm.bias": (1.0, 0.0, 1 / 4),
    }
    for block in (f"blocks.{number}" for number in range(4)):
        for matrix in ("attention.w_qkv", "attention.w_out", "feed_forward.w_gate_up",
                       "feed_forward.w_down"):  # fmt: skip
            expected[f"{block}.{matrix}.weight"] = (1 / 4, 0.4, 1 / 8)
        for vector in ("attention_norm.weight", "attention_norm.bias", "feed_forward_norm.weight",
                       "feed_forward_norm.bias", "attention.w_qkv.bias",
                       "attention.w_out.bias"):  # fmt: skip
            expected[f"{block}.{vector}"] = (1.0, 0.0, 1 / 8)
        for norm in ("q_norm", "k_norm"):
            for leaf in ("weight", "bias"):
                expected[f"{block}.attention.{norm}.{leaf}"] = (1.0, 0.0, 1 / 2)
    assert {
        name: pytest.approx((group["peak_lr"], group["weight_decay"], group["eps"]))
        for name, group in found.items()
    } == expected
    deviations = {
        "embeddings.weight": 0.02,
        "lm_head.weight": 0.02,
        "blocks.3.attention.w_qkv.weight": 0.02 / 2,
        "blocks.3.attention.w_out.weight": 0.02 / 2 / 2,  # and as sp has at 2 layers
        "blocks.3.feed_forward.w_down.weight": 0.02 / 2 / 2,
    }
    for name, std in deviations.items():
        assert initial_std(OURS, name) == pytest.approx(std), name
    scaling = OURS.scaling
    assert (scaling.residual, scaling.logits, scaling.attention(16)) == (1 / 2, 1 / 4, 1 / 16)
    weight = drawn(OURS).get_parameter("blocks.3.attention.w_out.weight")
    assert weight.std().item() == pytest.approx(0.005 * 0.9866, rel=0.02)  # cut off at 3


def test_the_other_tables_where_they_differ() -> None:
    hidden, out = "blocks.0.attention.w_qkv.weight", "blocks.0.attention.w_out.weight"
    mup = replace(OURS, parametrization="mup")
    found = options(Decoder(mup, device="meta"), AdamWConfig(lr=1.0, eps=1.0))[hidden]
    assert (found["lr"], found["weight_decay"], found["eps"]) == pytest.approx((1 / 4, 0.4, 1 / 4))
    assert (mup.scaling.residual, mup.scaling.logits) == (1, 1 / 4)
    assert initial_std(mup, out) == pytest.approx(0.02 / 2 / 8**0.5)
    muon = replace(OURS, parametrization="muon_mup")
    assert (muon.scaling.residual, muon.scaling.logits, muon.scaling.attention(16)) == (
        1, 1 / 4, None,
    )  # fmt: skip
    assert initial_std(muon, "lm_head.weight") == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("adjust", "rate"), [("none", 1), ("spectral_norm", 1), ("rms_norm", 1 / 2)]
)
@pytest.mark.parametrize("kind", [MuonConfig, DionConfig])
def test_an_orthogonal_update_takes_less_of_the_width(
    kind: type[Any], adjust: str, rate: float
) -> None:
    model = Decoder(replace(OURS, parametrization="muon_mup"), device="meta")
    found = options(model, kind(lr=1.0, weight_decay=0.1, eps=1.0, adjust_lr=adjust))
    for name, group in found.items():
        inside = name.startswith("blocks.") and ".w_" in name and name.endswith("weight")
        assert group["peak_lr"] == pytest.approx(rate if inside else 1), name
        assert ("parts" in group) is inside
        if inside:
            assert group["weight_decay"] == pytest.approx(0.1 / rate)
    assert found["lm_head.weight"]["eps"] == pytest.approx(1 / 4)


def test_lion_has_the_rates_of_adamw_and_overrides_are_multiplied() -> None:
    model, hidden = Decoder(OURS, device="meta"), "blocks.0.attention.w_qkv.weight"
    lion = options(model, LionConfig(lr=1.0, weight_decay=0.1))[hidden]
    assert (lion["lr"], lion["weight_decay"]) == pytest.approx((1 / 4, 0.4))
    own = [{"params": ["blocks.0.*"], "opts": {"lr": 0.5, "weight_decay": 0.2, "eps": 8.0}}]
    found = options(model, AdamWConfig(lr=1.0, group_overrides=own))[hidden]
    assert (found["lr"], found["weight_decay"], found["eps"]) == pytest.approx((1 / 8, 0.8, 1.0))


def same_run(config: DecoderConfig, optim: OptimConfig) -> list[Tensor]:
    """Weights before and after three steps, and logits."""
    model, found = drawn(config), list[Tensor]()
    ids = torch.arange(40).view(2, 20) % config.vocab_size
    found += [p.detach().clone() for p in model.parameters()]
    optimizer = optim.build(model)
    for _ in range(3):
        optimizer.zero_grad()
        found.append(logits := model(ids[:, :-1]))
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return [*found, *model.parameters()]


@pytest.mark.parametrize("optim", [AdamWConfig(lr=0.01), MuonConfig(lr=0.01, dtype="bfloat16")])
@pytest.mark.parametrize("name", SCALED)
def test_at_base_size_all_is_as_without_to_the_bit(name: Any, optim: OptimConfig) -> None:
    base = BaseConfig(d_model=32, n_layers=2, head_dim=8)
    at_base = same_run(replace(MODEL, parametrization=name, base=base), optim)
    for one, other in zip(same_run(MODEL, optim), at_base, strict=True):
        assert torch.equal(one, other)
    published = replace(MODEL, parametrization=name, base=replace(base, head_dim=None))
    if name != "muon_mup":  # as it was published, attention alone is another
        plain = replace(MODEL, attention=replace(MODEL.attention, query_pre_attn_scalar=64.0))
        for one, other in zip(same_run(plain, optim), same_run(published, optim), strict=True):
            assert torch.equal(one, other)


def test_a_tensor_without_a_role_stops_the_build() -> None:
    experts = {"name": "moe", "n_experts": 4, "top_k": 2, "hidden_size": 8}
    with pytest.raises(UsageError, match=r"completep has no rule for .*feed_forward\.router"):
        Decoder(replace(OURS, **vars(OURS.changed(feed_forward=experts))), device="meta")
    model = Decoder(OURS, device="meta")
    model.extra = nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(UsageError, match="no rule for the parameter extra"):
        AdamWConfig().build(model)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(UsageError, match="mup needs the base size"):
        replace(MODEL, parametrization="mup")
    with pytest.raises(UsageError, match="sp has no base size"):
        replace(MODEL, base=BaseConfig(**BASE))
    with pytest.raises(UsageError, match="completep gives the scale of attention"):
        OURS.changed(attention={"query_pre_attn_scalar": 4.0})
    with pytest.raises(UsageError, match="a part of your own does not know what completep"):
        replace(OURS, block=type("OwnBlock", (BlockConfig,), {})())


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Of the logarithm of values against that of sizes."""
    x, y = torch.tensor(sizes).log(), torch.tensor(values).log()
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def watched(
    width: int, name: Any, optim: OptimConfig, steps: int = 5
) -> tuple[dict[str, float], dict[str, float]]:
    """Mean |activation| after some steps, by place, how far logits moved, and gradients."""
    base = None if name == "sp" else BaseConfig(d_model=64, n_layers=2)
    model = drawn(
        DecoderConfig(
            vocab_size=64,
            d_model=width,
            n_layers=2,
            n_heads=width // 16,
            base=base,
            parametrization=name,
            feed_forward={"hidden_size": 3 * width},
        )
    )
    ids = torch.randint(64, (2, 65), generator=torch.Generator().manual_seed(0))
    optimizer, found = optim.build(model), dict[str, float]()

    def keep(place: str, _: nn.Module, given: object, out: Tensor) -> None:
        found[place] = out.abs().mean().item()

    first = torch.empty(0)
    for step in range(steps + 1):
        if step == steps:
            for place, module in model.named_modules():
                if place not in ("", "blocks"):
                    module.register_forward_hook(partial(keep, place))
        logits = model(ids[:, :-1])
        first = logits.detach() if step == 0 else first
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        if step < steps:
            optimizer.step()
    moved = (logits.detach() - first).gather(2, ids[:, 1:, None])
    found["logits of labels, moved"] = moved.mean().item()
    gradients = {n: p.grad.square().mean().sqrt().item() for n, p in model.named_parameters()}
    return found, gradients


ADAMW = AdamWConfig(lr=2e-3, weight_decay=0.0)
MUON = MuonConfig(lr=2e-3, weight_decay=0.0)
WIDTHS = (64, 128, 256)


def test_activations_do_not_change_with_width() -> None:
    """The coordinate check (Yang et al., 2022), with sp as the control that fails it."""
    for name, optim in (("mup", ADAMW), ("completep", ADAMW), ("muon_mup", MUON), ("sp", ADAMW)):
        runs = [watched(width, name, optim) for width in WIDTHS]
        slopes = {place: slope(WIDTHS, [run[place] for run, _ in runs]) for place in runs[0][0]}
        if name == "sp":
            assert max(slopes.values()) > 0.3
            continue
        if name == "muon_mup":  # its head begins smaller the wider it is
            del slopes["logits of labels, moved"]
        assert {p: s for p, s in slopes.items() if not -0.1 <= s <= 0.1} == {}, name
        if name == "completep":  # eps of AdamW stays the same part of a gradient
            for each in runs[0][1]:
                found = slope(WIDTHS, [gradients[each] for _, gradients in runs])
                assert found == pytest.approx(OURS.scaling.rule(each).eps[0], abs=0.25), each


def test_layers_of_a_deep_model_add_as_much_as_those_of_the_base() -> None:
    """completep: what a layer adds to the stream goes as 1 / m_L, so all of them as 1."""
    found = [added(layers) for layers in (2, 4, 8)]
    assert slope((2, 4, 8), found) == pytest.approx(-1, abs=0.2)


def added(layers: int) -> float:
    """What the first of so many blocks adds to the stream."""
    config = DecoderConfig(
        vocab_size=64, d_model=64, n_layers=layers, n_heads=4, parametrization="completep",
        base=BaseConfig(**BASE),
    )  # fmt: skip
    ids = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(0))
    model = drawn(config)
    with torch.no_grad():
        x = model.embeddings(ids)
        y = model.blocks[0](x, None, model.contexts(ids)[0])
    return float((y - x).abs().mean())


def test_a_run_goes_on_with_its_own_parametrization_alone(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    def trainer(size: str, steps: int) -> Any:
        model = f"--model={{d_model: 32, n_layers: 2, n_heads: 4, {size}}}"
        return build_trainer(tiny_mixture, tmp_path / "run", model, quiet=True, stop=steps)

    own = "parametrization: mup, base: {d_model: 16, n_layers: 2}"
    trainer(own, 1).fit()
    saved = json.loads((tmp_path / "run" / "config.json").read_bytes())["model"]
    assert saved["parametrization"] == "mup"
    assert saved["base"] == {"d_model": 16, "n_layers": 2, "head_dim": None}
    for other, what in (
        ("parametrization: sp", "model.parametrization: 'mup' -> 'sp'"),
        (own.replace("16", "8"), "model.base.d_model: 16 -> 8"),
    ):
        with pytest.raises(ValidationError, match=re.escape(what)):
            trainer(other, 2).fit()
    trainer(own, 2).fit()


def test_other_optimisers_are_refused_by_name() -> None:
    model = Decoder(OURS, device="meta")
    with pytest.raises(UsageError, match="has no rates for the optimiser adam"):
        AdamConfig().build(model)
    AdamConfig(weight_decay=0.0).build(model)
    nadam = NamedOptim.of("torch.optim:NAdam", torch.optim.NAdam, {"lr": 0.1})
    with pytest.raises(UsageError, match=r"has no rates for the optimiser torch\.optim:NAdam"):
        nadam.build(model)
