"""Muon divided over ranks: the bits of one rank, each matrix worked on once, balanced rounds."""

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
from support.training import MODEL, build, digest, full

from olm_train.distributed.world import World
from olm_train.model.shards import assign
from olm_train.optim import muon
from olm_train.optim.division import Division, Grid, Matrix
from olm_train.optim.muon import MuonConfig, cost
from olm_train.train_module import TransformerTrainModule

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


def stepped(module: TransformerTrainModule, *, without: str | None = None) -> dict[str, str]:
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
        results[layout] = stepped(module_of(layout, world)), Counter(done)
    for layout in ("fsdp", "ddp"):
        module = module_of(layout, world, param_dtype="bfloat16")
        results[f"{layout}, bfloat16"] = stepped(module), Counter()
    return results | {"some": (stepped(module_of("fsdp", world), without=SOME), Counter())}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_t10_ranks_divide_the_matrices_and_end_with_the_bits_of_one(ranks: int) -> None:
    alone = module_of("fsdp")
    expected, some = stepped(alone), stepped(module_of("fsdp"), without=SOME)
    reduced = stepped(module_of("fsdp", param_dtype="bfloat16"))
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
