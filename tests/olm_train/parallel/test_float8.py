"""Float8 products: those of an explicit reference, in inner blocks alone; all else as it was.

What torchao computes is asked of its emulation, which rounds as a device does.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.distributed import run_ranks
from support.expert_ranks import EXPERTS
from support.training import MODEL, ROWS, Run, build, digest, full, micro_batches, train
from torch import Tensor

from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.estimate.memory import memory_of_step
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.layers import LinearLayer, product
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.config import ContextParallelConfig, TensorParallelConfig
from olm_train.parallel.float8 import Float8Config, _OfParts
from olm_train.parallel.tensor import ByColumns, ByRows, Ranks
from olm_train.train_module import TransformerTrainModule

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
DEEP = MODEL.changed(n_layers=4)
with_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def emulated(recipe: str = "rowwise") -> Float8Config:
    return Float8Config(ao_recipe=recipe, emulate=True)  # type: ignore[arg-type]


def module_of(recipe: str | None = "rowwise", **options: Any) -> TransformerTrainModule:
    defaults: dict[str, Any] = {"model": DEEP, "param_dtype": "bfloat16"}
    float8 = None if recipe is None else emulated(recipe)
    return build(**{**defaults, "float8_config": float8, **options})


def converted(model: Decoder) -> set[str]:
    return {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, LinearLayer) and layer.product is not product
    }


def test_the_first_and_the_last_block_and_odd_sizes_are_left_out_and_named() -> None:
    model = build_decoder(DEEP.changed(feed_forward={"hidden_size": 40}), device="meta")
    chosen = emulated().choose(model, torch.bfloat16)
    names = ("attention.w_qkv", "attention.w_out", "feed_forward.w_gate_up")
    assert set(chosen.converted) == {f"blocks.{i}.{name}" for i in (1, 2) for name in names}
    assert str(chosen) == (
        "float8 rowwise: 6 linear layers (attention.w_qkv, attention.w_out, "
        "feed_forward.w_gate_up); not: 8 of the first and the last block (attention.w_qkv, "
        "attention.w_out, feed_forward.w_gate_up, feed_forward.w_down); 2 with sizes that are no "
        "multiples of 16 (feed_forward.w_down)"
    )


def test_experts_and_routers_are_left_out() -> None:
    chosen = emulated().choose(
        build_decoder(DEEP.changed(feed_forward=EXPERTS), device="meta"), torch.bfloat16
    )
    within = {name.split(".", 2)[2] for name in chosen.converted}
    shared = {"feed_forward.shared.w_gate_up", "feed_forward.shared.w_down"}
    assert within == {"attention.w_qkv", "attention.w_out", *shared}
    assert chosen.left["experts"] == ["feed_forward.experts"] * 4


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ("rowwise", {"param_dtype": "float32"}, "give bfloat16, and the blocks compute in float32"),
        ("rowwise", {"model": MODEL}, "converts none of the model's linear layers: 8 of the first"),
        ("rowwise", {"rank_microbatch_size": 24}, "multiple of 16 tokens, and a rank has 24"),
        (
            "rowwise",
            {"rank_microbatch_size": 48, "cp_config": ContextParallelConfig(degree=2)},
            "and a rank has 24",
        ),
        ("mxfp8", {"rank_microbatch_size": 48}, "multiple of 32 tokens, and a rank has 48"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    recipe: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        module_of(recipe, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_device_without_such_products_is_refused(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Float8Config(ao_recipe=recipe)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=rf"(?s)a CPU has no products of {recipe}.*emulate: true"):
        module_of(float8_config=config)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    for capability, has in (((8, 0), False), ((8, 9), recipe != "mxfp8"), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        if has:
            config._require(torch.device("cuda"))
        else:
            with pytest.raises(UsageError, match=f"Some GPU has no products of {recipe}"):
                config._require(torch.device("cuda"))


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UsageError, match=r"(?s)torchao.*pip install 'olm-data\[float8\]'"):
        module_of()


def in_8_bits(x: Tensor, dtype: torch.dtype, recipe: str) -> Tensor:
    """What is left of x [m, k] in 8 bits, fp32; rows share a scale unless it is tensorwise."""
    x, largest = x.float(), torch.finfo(dtype).max
    if recipe == "mxfp8":
        blocks = x.unflatten(-1, (-1, 32))
        scale = torch.exp2((largest / blocks.abs().amax(-1, keepdim=True)).log2().floor())
        return ((blocks * scale).to(dtype).float() / scale).flatten(-2)
    amax = x.abs().max() if recipe == "tensorwise" else x.abs().amax(-1, keepdim=True)
    scale = (largest / amax.double()).float()
    if recipe != "tensorwise":
        scale = torch.exp2(scale.log2().floor())
    return (x * scale).clamp(-largest, largest).to(dtype).float() / scale


@with_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_and_gradients_are_those_of_an_explicit_reference(recipe: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, given = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((64, 96), (32, 96), (64, 32))
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    bias = torch.ones(32, dtype=torch.bfloat16)
    out = emulated(recipe)._product()(x, weight, bias)
    out.backward(given)
    e4m3 = torch.float8_e4m3fn
    back = torch.float8_e5m2 if recipe == "tensorwise" else e4m3

    def product(a: Tensor, b: Tensor, of_a: torch.dtype, recipe_of_b: str = recipe) -> Tensor:
        return in_8_bits(a, of_a, recipe) @ in_8_bits(b, e4m3, recipe_of_b).T  # [m, k], [n, k]

    exact = recipe == "rowwise_with_gw_hp"
    of_weight = given.float().T @ x.float() if exact else product(given.T, x.T, back)
    of_x = product(given, weight.T, back, "tensorwise" if exact else recipe)
    if exact:  # torchao rounds this scale to a power of two as well
        scale = torch.exp2((448 / weight.float().abs().max()).log2().floor())
        of_x = in_8_bits(given, e4m3, recipe) @ ((weight * scale).to(e4m3).float() / scale)
    expected = (product(x, weight, e4m3).bfloat16() + bias, of_x, of_weight)
    for found, wanted in zip((out, x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=8e-3, atol=1e-3)
    assert (out - F.linear(x, weight, bias)).norm() > 0.01 * out.norm()


@with_torchao
def test_weights_names_and_state_are_those_of_a_run_without_it() -> None:
    plain, module = module_of(None), module_of()
    assert not converted(plain.model)
    assert {name.split(".")[1] for name in converted(module.model)} == {"1", "2"}
    for part, tensors in full(module).items():
        assert digest(tensors) == digest(full(plain)[part])
    assert any(line.startswith("float8 rowwise: 8 linear") for line in module.describe())
    train(module, [ROWS], steps=[1])
    plain.load_state_dict(module.state_dict())
    assert digest(full(plain)["model"]) == digest(full(module)["model"])
    kinds = (memory_of_step(DEEP, each.config, sequence_length=32, world_size=1)
             for each in (plain, module))  # fmt: skip
    assert next(kinds) == next(kinds)


@with_torchao
@pytest.mark.parametrize(
    "recipe", [*RECIPES[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in RECIPES[2:])]
)
def test_a_model_learns_as_well_as_in_bfloat16(recipe: str) -> None:
    plain, run = (train(module_of(each), [ROWS]) for each in (None, recipe))
    assert plain.initial == run.initial
    assert plain.losses != run.losses
    assert plain.losses[-1] < 0.95 * plain.losses[0]
    assert run.losses == pytest.approx(plain.losses, rel=0.01)


@with_torchao
@pytest.mark.parametrize("mode", ["full", "selected_ops"])
def test_what_is_computed_again_has_the_same_bits(mode: Any) -> None:
    kept = train(module_of(), [ROWS], steps=[1, 2])
    checkpointing = ActivationCheckpointingConfig(mode=mode)
    again = train(module_of(ac_config=checkpointing), [ROWS], steps=[1, 2])
    assert (again.losses, digest(again.weights)) == (kept.losses, digest(kept.weights))


def on_ranks() -> dict[str, Run]:
    """What each rank does: rows one by one, so that the scales are those of one rank."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    runs = {}
    for strategy in ("fsdp", "ddp"):
        runs[strategy] = train(module_of(strategy=strategy, world=world), [1] * 4, steps=[1, 2])
    return runs


@with_torchao
@pytest.mark.slow
def test_ranks_have_the_scales_of_one() -> None:
    alone = train(module_of(), [1] * ROWS, steps=[1, 2])
    for rank in run_ranks(on_ranks, 2):
        for run in rank.values():
            assert run.initial == alone.initial
            assert run.losses[0] == pytest.approx(alone.losses[0], rel=1e-6)
            assert run.norms == pytest.approx(alone.norms, rel=5e-3)


@with_torchao
@pytest.mark.slow
def test_compiled_blocks_learn_the_same() -> None:
    eager, compiled = (module_of(compile_model=compiles) for compiles in (False, True))
    batches = micro_batches(1, [ROWS], eager.world)
    losses = [
        [float(module.train_step(batches, step, 6)["train/CE loss"]) for step in (1, 2)]
        for module in (eager, compiled)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


# ---- beside tensor parallelism -------------------------------------------------------------------

CUT = DEEP.changed(vocab_multiple=4, d_model=64, feed_forward={"hidden_size": 64})
OF_PARTS = RECIPES[:3]


def drawn(*shape: int, cut: int, seed: int) -> Tensor:
    """Numbers whose second half along a dimension vanishes beside the largest one of the first."""
    halves = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).chunk(2, cut)
    return torch.cat((halves[0], halves[1] * 1e-5), cut).bfloat16()


def products_of_parts(recipe: str, rank: int, ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """Products of this rank's part, and what an explicit reference has there of the whole."""
    layer, found = emulated(recipe)._layer(), list[tuple[Tensor, Tensor]]()
    e4m3 = torch.float8_e4m3fn
    back = torch.float8_e5m2 if recipe == "tensorwise" else e4m3
    exact = recipe == "rowwise_with_gw_hp"

    def whole(tensor: Tensor, dtype: torch.dtype = e4m3, how: str = recipe) -> Tensor:
        return in_8_bits(tensor, dtype, how)

    for by_rows in (True, False):
        cut = ByRows(ranks) if by_rows else ByColumns(ranks)
        products = _OfParts(layer, cut, torch.device("cpu"))
        own = slice(32 * rank, 32 * rank + 32)
        rows, columns = (own, slice(None)) if by_rows else (slice(None), own)
        x, weight, grad = (
            drawn(*shape, cut=dim, seed=n)
            for n, (shape, dim) in enumerate(
                [((64, 64), 1), ((64, 64), 0 if by_rows else 1), ((64, 64), 1)]
            )
        )
        out = whole(x)[:, columns] @ whole(weight)[rows, columns].T
        turned = whole(weight.T)  # a scale for each column, which is summed over
        if exact:
            scale = torch.exp2((448 / weight.float().abs().max()).log2().floor())
            turned = ((weight.float() * scale).to(e4m3).float() / scale).T
        of_x = whole(grad, back)[:, rows] @ turned[columns, rows].T
        of_weight = (
            grad.float()[:, rows].T @ x.float()[:, columns]
            if exact
            else whole(grad.T, back)[rows] @ whole(x.T)[columns].T
        )
        mine = x[:, columns], weight[rows, columns].contiguous(), grad[:, rows]
        found += [
            (products.out(mine[0], mine[1], None), out),
            (products.of_input(mine[2], mine[1]), of_x),
            (products.of_weight(mine[2], mine[0]), of_weight),
        ]
    return found


def cut_ranks() -> dict[str, Any]:
    """What each rank does with its part of each matrix."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    results: dict[str, Any] = {}
    for recipe in OF_PARTS:
        module = module_of(
            recipe, model=CUT, world=world, tp_config=TensorParallelConfig(degree=world.size)
        )
        results[recipe] = train(module, [ROWS])
        if world.size == 2:
            ranks = Ranks(dist.group.WORLD, world.rank, 2)
            results[f"{recipe}, products"] = products_of_parts(recipe, world.rank, ranks)
    return results


@with_torchao
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_matrix_have_the_scales_of_the_whole(size: int) -> None:
    plain = train(module_of(None, model=CUT), [ROWS])
    alone = {recipe: train(module_of(recipe, model=CUT), [ROWS]) for recipe in OF_PARTS}
    for rank in run_ranks(cut_ranks, size):
        for recipe, expected in alone.items():
            run = rank[recipe]
            assert run.initial == expected.initial
            assert run.losses[0] == pytest.approx(expected.losses[0], rel=5e-4)
            assert run.losses == pytest.approx(expected.losses, rel=0.01)
            assert run.losses == pytest.approx(plain.losses, rel=0.02)
            for found, wanted in rank.get(f"{recipe}, products", ()):
                near = 5e-3 * float(wanted.abs().max())
                torch.testing.assert_close(found.float(), wanted, rtol=8e-3, atol=near)


def test_parts_that_cannot_be_multiplied_are_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)a rank has 32 x 24 of blocks.1.*multiples of 16"):
        emulated()._require_multiple("blocks.1.feed_forward.w_down", torch.empty(32, 24))
