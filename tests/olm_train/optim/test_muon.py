"""Muon: nearly orthogonal updates, part by part, and who works on which matrix."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.model_options import drawn, steps_of_chance
from support.training import MODEL, build, digest, full

from olm_train.distributed.world import World
from olm_train.model.shards import assign
from olm_train.optim import muon
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.base import OptimConfig
from olm_train.optim.dion import DionConfig
from olm_train.optim.division import Division, Grid, Matrix
from olm_train.optim.groups import GroupOverride
from olm_train.optim.muon import Muon, MuonConfig, cost, orthogonalise, scale
from olm_train.train_module import TransformerTrainModule


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
    model = drawn(MODEL)
    optimizer = config.build(model)
    steps_of_chance(model, optimizer, 2)
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
    model = drawn(MODEL)
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
    model = drawn(MODEL.changed(feed_forward=experts))
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
    model = drawn(MODEL)
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


STEPS = 3
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "ddp": ("ddp", {}),
    "hsdp": ("hsdp", {"num_replicas": 2}),
    "offload": ("fsdp", {"cpu_offload": True}),
}
SOME = "w_down.weight"
"""Parameters without a gradient after the first step, in one of the checks."""


def module_of(
    layout: str, world: World | None = None, *, param_dtype: str = "float32"
) -> TransformerTrainModule:
    strategy, sharing = LAYOUTS[layout]
    model = replace(MODEL, n_layers=3)  # 18 matrices: on 4 ranks the last round is not full
    return build(
        strategy, world=world, model=model, sharing=sharing, param_dtype=param_dtype,
        optim=MuonConfig(lr=1e-2),
    )  # fmt: skip


def digests(module: TransformerTrainModule, *, without: str | None = None) -> dict[str, str]:
    """Take steps on gradients that do not depend on the ranks; return digests of what Muon made.

    Gradients of a loss would: sums are made in another order. And AdamW's fused kernel rounds the
    last elements of a vector otherwise than the others, so that shards differ in the last bit.
    """
    for step in range(STEPS):
        for number, (name, parameter) in enumerate(module.model.named_parameters()):
            if without and name.endswith(without) and step:
                parameter.grad = None
                continue
            generator = torch.Generator().manual_seed(1000 * step + number)
            parameter.grad = torch.empty_like(parameter)
            assign(parameter.grad, torch.randn(parameter.shape, generator=generator))
        module.optimizer.step()
    return {
        part: digest({n: x for n, x in tensors.items() if ".w_" in n and n.startswith("blocks.")})
        for part, tensors in full(module).items()
    }


def on_ranks() -> dict[str, tuple[dict[str, str], Counter[Any]]]:
    """On each rank, by layout: the state after some steps, and the shapes orthogonalised here."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    plain, done = muon.orthogonalise, Counter[Any]()

    def counted(matrix: torch.Tensor) -> torch.Tensor:
        done[tuple(matrix.shape)] += 1
        return plain(matrix)

    muon.orthogonalise = counted
    results = {}
    for layout in LAYOUTS if world.size == 4 else ("fsdp", "ddp"):
        done.clear()
        results[layout] = digests(module_of(layout, world)), Counter(done)
    for layout in ("fsdp", "ddp"):
        module = module_of(layout, world, param_dtype="bfloat16")
        results[f"{layout}, bfloat16"] = digests(module), Counter()
    return results | {"some": (digests(module_of("fsdp", world), without=SOME), Counter())}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_t10_ranks_divide_the_matrices_and_end_with_the_bits_of_one(ranks: int) -> None:
    alone = module_of("fsdp")
    expected, some = digests(alone), digests(module_of("fsdp"), without=SOME)
    reduced = digests(module_of("fsdp", param_dtype="bfloat16"))
    assert expected != some
    assert expected != reduced
    shapes = Counter(
        (rows, linear.weight.shape[1])
        for linear in alone.model.blocks.modules()
        for rows in getattr(linear, "parts", ())
    )
    total = sum(shapes.values()) * STEPS
    results = run_ranks(on_ranks, ranks)
    for layout in results[0]:
        states, done = zip(*(rank[layout] for rank in results), strict=True)
        if layout == "some":
            assert all(state == some for state in states)
            continue
        if layout.endswith("bfloat16"):
            assert all(state == reduced for state in states), layout
            continue
        assert all(state == expected for state in states), layout
        assert sum(done, Counter()) == Counter({s: n * STEPS for s, n in shapes.items()}), layout
        counts = [each.total() for each in done]
        assert max(counts) <= -(-total // ranks) + STEPS, layout


@given(rows=st.integers(1, 40), shards=st.integers(1, 9), data=st.data())
def test_t10_the_rows_of_shards_are_the_matrix_and_lie_where_torch_puts_them(
    rows: int, shards: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(first + 1, rows))
    matrix, whole = Matrix(rows, 1, first, stop), torch.arange(rows)
    parts = [*whole.chunk(shards), *[whole[:0]] * shards][:shards]
    found = torch.cat([part[matrix.local(at, shards)] for at, part in enumerate(parts)])
    assert torch.equal(found, whole[first:stop])
    ends = [matrix.part(at, shards) for at in range(shards)]
    assert sum(end.stop - end.start for end in ends) == stop - first
    assert all(
        torch.equal(part[matrix.local(at, shards)], whole[first:stop][end])
        for at, (part, end) in enumerate(zip(parts, ends, strict=True))
    )


@given(
    shapes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=60),
    ranks=st.integers(1, 16),
)
def test_t10_rounds_take_each_matrix_once_and_wait_for_little(
    shapes: list[tuple[int, int]], ranks: int
) -> None:
    costs = [cost(*shape) for shape in shapes]
    matrices = [Matrix(rows, columns, 0, rows) for rows, columns in shapes]
    division = Division(matrices, costs, Grid(shards=ranks), torch.empty(0))
    taken = [item for items in division.rounds for item in items if item is not None]
    assert sorted(taken) == list(range(len(shapes)))
    assert all(len(items) == ranks for items in division.rounds)
    # A round takes as long as its costliest matrix: at most one of them more than a fair share.
    longest = sum(max(costs[i] for i in items if i is not None) for items in division.rounds)
    assert longest <= sum(costs) / ranks + max(costs)


def test_t10_rounds_overlap_with_the_exchanges_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next round needs is asked for before this one is worked on."""
    events: list[str] = []
    asked = Division._all_to_all

    def recorded(self: Division, *arguments: Any) -> Any:
        events.append("ask")
        return asked(self, *arguments)

    monkeypatch.setattr(Division, "_all_to_all", recorded)
    matrices = [Matrix(2, 2, 0, 2)] * 3
    division = Division(matrices, [1, 1, 1], Grid(), torch.empty(0))

    def work(number: int, whole: torch.Tensor) -> torch.Tensor:
        events.append(f"work {number}")
        return whole

    division.run(lambda _: torch.ones(2, 2), work, lambda n, _: events.append(f"use {n}"))
    assert events.index("work 0") == 2  # after its own exchange and that of the next
    assert events.index("use 0") > events.index("work 1")
    assert [e for e in events if e.startswith("use")] == ["use 0", "use 1", "use 2"]
