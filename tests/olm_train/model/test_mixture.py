"""Mixtures of experts, drawn or begun from a dense model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.model_options import drawn
from torch import Tensor

from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.feed_forward import GatedFeedForward
from olm_train.model.mixture import MixtureConfig, MixtureOfExperts, Routed, Routing
from olm_train.model.upcycle import Slices, dense_name, put_copies, refuse_unequal

WIDTH = 16
SMALL: dict[str, Any] = {"n_experts": 6, "top_k": 2, "hidden_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalised": {"normalize_scores": True, "score_scale": 2.5},
    "sigmoid": {"scores": "sigmoid", "normalize_scores": True, "shared_hidden_size": 8},
    "shared": {"shared_hidden_size": 40, "balance": None},
    "all": {"top_k": 6},
    "first": {"top_k": 1},
}


def layer(seed: int = 0, **options: Any) -> MixtureOfExperts:
    module = MixtureOfExperts(MixtureConfig(**SMALL | options), WIDTH)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        if module.router.bias is not None:
            module.router.bias.copy_(0.1 * torch.randn(6, generator=generator))
    return module


def states(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


def by_loop(module: MixtureOfExperts, x: Tensor) -> Tensor:
    """What the layer is: each token by itself, each of its experts by itself."""
    config, outputs = module.config, []
    for token in x.flatten(0, -2):
        logits = module.router.weight @ token
        scores = logits.softmax(0) if config.scores == "softmax" else logits.sigmoid()
        bias = 0 if module.router.bias is None else module.router.bias
        chosen = (scores + bias).topk(config.top_k).indices
        weights = scores[chosen]
        if config.normalize_scores:
            weights = weights / weights.sum()
        total = torch.zeros_like(token)
        for expert, weight in zip(chosen, weights * config.score_scale, strict=True):
            gate, up = (module.experts.w_gate_up[expert] @ token).chunk(2)
            total = total + weight * (module.experts.w_down[expert] @ (F.silu(gate) * up))
        outputs.append(total if module.shared is None else total + module.shared(token))
    return torch.stack(outputs).view_as(x)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_a_loop_over_experts(kind: str) -> None:
    found = {}
    for way in (MixtureOfExperts.__call__, by_loop):
        module, x = layer(**KINDS[kind]), states(2, 9).requires_grad_()
        y = way(module, x)
        (y * states(2, 9, seed=2)).sum().backward()
        named = {name: p.grad for name, p in module.named_parameters()}
        found[way] = {"y": y.detach(), "x": x.grad, **named}
    ours, loop = found.values()
    assert ours["router.weight"].abs().sum() > 0
    for name, expected in loop.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-5, msg=name)


def test_an_expert_without_a_token_gets_a_gradient_of_zero() -> None:
    module = layer()
    module.router.bias[2:4] = -10.0
    module(states(4, 5)).sum().backward()
    for parameter in module.experts.parameters():
        alive = parameter.grad.flatten(1).abs().sum(1) > 0
        assert alive.tolist() == [True, True, False, False, True, True]


def test_one_expert_is_a_dense_layer() -> None:
    module = layer(n_experts=1, top_k=1, balance=None)
    dense = GatedFeedForward(WIDTH, 24, activation="silu", bias=False)
    with torch.no_grad():
        dense.w_gate_up.weight.copy_(module.experts.w_gate_up[0])
        dense.w_down.weight.copy_(module.experts.w_down[0])
    torch.testing.assert_close(module(states(3, 4)), dense(states(3, 4)), rtol=1e-5, atol=1e-6)


def test_in_bfloat16_the_router_still_computes_in_fp32() -> None:
    module, x = layer(balance=None), states(64).bfloat16()
    y = module(x)
    assert y.dtype == torch.bfloat16
    logits = module.router(x)
    assert logits.dtype == torch.float32
    expected = x.double() @ module.router.weight.bfloat16().double().T
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y.float(), layer(balance=None)(x.float()), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_layer_says_what_its_router_did_with_the_tokens_that_count(scores: str) -> None:
    module, x = layer(scores=scores), states(20)
    counted = torch.arange(20) % 3 > 0
    documents = torch.tensor([0] * 4 + [1] * 9 + [2] * 7)
    y, found = module(x, routing=Routing(counted, documents, 5))
    assert torch.equal(y, module(x))
    assert isinstance(found, Routed)
    logits = module.router(x)
    each = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    chosen = F.one_hot((each + module.router.bias).topk(2).indices, 6).sum(1)  # [T, E]
    shares = each / each.sum(-1, keepdim=True)
    assert found.counts.dtype == torch.int64
    assert torch.equal(found.counts, chosen[counted].sum(0))
    torch.testing.assert_close(found.scores, shares[counted].sum(0))
    torch.testing.assert_close(found.z, logits[counted].logsumexp(-1).square().sum())
    within = 0.0
    for document in range(3):
        here = counted & (documents == document)
        slots = chosen[here].sum(0) / chosen[here].sum()
        within += (here.sum() * 6 * (slots * shares[here].mean(0)).sum()).item()
    assert found.within.item() == pytest.approx(within, rel=1e-5)


@pytest.mark.parametrize("factor", [0.4, 1.0, 1.3])
def test_beyond_its_capacity_an_expert_loses_the_choices_of_the_smallest_weights(
    factor: float,
) -> None:
    options = {"normalize_scores": True, "capacity_factor": factor}
    module, x = layer(**options), states(20).requires_grad_()
    told = Routing(torch.arange(20) > 2)
    y, found = module(x, routing=told)
    room = math.ceil(factor * 20 * 2 / 6)
    scores = module.router(x).softmax(-1)
    chosen = (scores + module.router.bias).topk(2).indices
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    expected, dropped = [], 0
    for token in range(20):
        total = torch.zeros(WIDTH)
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            if (weights[chosen == expert] > weight).sum() < room:
                gate, up = (module.experts.w_gate_up[expert] @ x[token]).chunk(2)
                total = total + weight * (module.experts.w_down[expert] @ (F.silu(gate) * up))
            else:
                dropped += token > 2
        expected.append(total)
    torch.testing.assert_close(y, torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert found.dropped.item() == dropped
    assert dropped > 0
    torch.testing.assert_close(found.counts, layer(**options)(x, routing=told)[1].counts)
    assert torch.equal(module(x), layer(normalize_scores=True)(x))  # in evaluation there is none
    mine, theirs = (torch.autograd.grad(each.sum(), x, retain_graph=True)[0]
                    for each in (y, torch.stack(expected)))  # fmt: skip
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_of_equal_weights_the_first_tokens_have_room() -> None:
    module = layer(top_k=1, normalize_scores=True, capacity_factor=1.0)
    y, found = module(states(1).expand(12, -1), routing=Routing(torch.ones(12, dtype=torch.bool)))
    assert (y.abs().sum(1) > 0).tolist() == [True] * 2 + [False] * 10
    assert found.dropped.item() == 10


def test_blocks_with_experts_come_after_the_dense_ones() -> None:
    config = DecoderConfig(
        vocab_size=50,
        d_model=WIDTH,
        n_layers=3,
        n_heads=2,
        feed_forward={"name": "moe", **SMALL, "first_dense": 1, "dense_hidden_size": 32},
    )
    model = Decoder(config, device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    named = {name: shape for name, shape in shapes.items() if ".feed_forward." in name}
    assert named == {
        "blocks.0.feed_forward.w_gate_up.weight": (64, WIDTH),
        "blocks.0.feed_forward.w_down.weight": (WIDTH, 32),
        **{
            f"blocks.{block}.feed_forward.{name}": shape
            for block in (1, 2)
            for name, shape in (
                ("router.weight", (6, WIDTH)),
                ("router.bias", (6,)),
                ("experts.w_gate_up", (6, 48, WIDTH)),
                ("experts.w_down", (6, WIDTH, 24)),
            )
        },
    }
    assert config.num_params == sum(p.numel() for p in model.parameters())
    idle = 2 * 4 * 3 * WIDTH * 24
    assert config.num_active_params == config.num_params - idle


SIZES: dict[str, Any] = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4}
DENSE = DecoderConfig(**SIZES, feed_forward={"hidden_size": 40}, init_std=0.2)
EXPERTS: dict[str, Any] = {"name": "moe", "n_experts": 6, "top_k": 2, "hidden_size": 40}
NORMALISED = EXPERTS | {"normalize_scores": True}


def mixture(**options: Any) -> DecoderConfig:
    return DENSE.changed(feed_forward=options)


@pytest.mark.parametrize(
    "options",
    [
        NORMALISED,
        NORMALISED | {"scores": "sigmoid", "score_scale": 2.5},
        NORMALISED | {"first_dense": 1, "dense_hidden_size": 40, "balance": None},
        NORMALISED | {"top_k": 1},
        EXPERTS | {"top_k": 6},
    ],
)
@torch.no_grad()
def test_logits_are_those_of_the_dense_model(options: dict[str, Any]) -> None:
    dense, model = drawn(DENSE, 1), drawn(mixture(**options), 2)
    refuse_unequal(DENSE, model.config)
    source = dict(dense.named_parameters())

    def read(name: str, where: Slices) -> Tensor:
        return source[name][where]

    for name, parameter in model.named_parameters():
        whole = tuple(slice(0, size) for size in parameter.shape)
        if dense_name(name) is not None:
            put_copies(parameter.data, whole, name, read, model.config)
        elif "router" not in name:
            parameter.copy_(source[name])
    ids = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(model(ids), dense(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dense", "options", "said"),
    [
        ({}, EXPERTS, "feed_forward.normalize_scores is false"),
        ({}, EXPERTS | {"top_k": 6, "scores": "sigmoid"}, "feed_forward.normalize_scores is false"),
        ({}, NORMALISED | {"hidden_size": 48}, "feed_forward.hidden_size is 48, not 40"),
        ({}, NORMALISED | {"shared_hidden_size": 8}, "feed_forward.shared_hidden_size"),
        (
            *({}, NORMALISED | {"first_dense": 1, "dense_hidden_size": 48}),
            "feed_forward.dense_hidden_size is 48, not 40",
        ),
        ({}, {"name": "swiglu", "hidden_size": 40}, "is no mixture of experts"),
        ({"head": {"tied": True}}, NORMALISED, r"model\.head\.tied is False, not True"),
        (
            *({"feed_forward": {"name": "geglu", "hidden_size": 40}}, NORMALISED),
            "the feed-forward layer of the weights is geglu",
        ),
        (
            *({"feed_forward": {"hidden_size": 40, "bias": True}}, NORMALISED),
            "the feed-forward layer of the weights is swiglu with biases",
        ),
        ({"feed_forward": NORMALISED}, NORMALISED, "the feed-forward layer of the weights is moe"),
    ],
)
def test_a_mixture_with_other_logits_is_refused(
    dense: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    refuse_unequal(DENSE.changed(attention={"backend": "sdpa"}), mixture(**NORMALISED))
    with pytest.raises(UsageError, match=said):
        refuse_unequal(DENSE.changed(**dense), mixture(**options))
