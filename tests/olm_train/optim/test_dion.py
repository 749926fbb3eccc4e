"""Dion: the steps of an explicit reference, part by part, the same on any layout of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.model_options import drawn
from support.training import MODEL, ROWS, build, digest, full, train
from torch import Tensor

from olm_train.distributed.world import World
from olm_train.model.shards import assign, like
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.dion import Dion, DionConfig, Stack, rank_of
from olm_train.optim.division import CutMatrix, Matrix
from olm_train.parallel.config import ExpertParallelConfig, TensorParallelConfig
from olm_train.train_module import TransformerTrainModule

STEPS = 3
EXPERTS = MODEL.changed(
    n_layers=3,
    vocab_multiple=4,
    feed_forward={"name": "moe", "n_experts": 4, "top_k": 2, "hidden_size": 24}
    | {"first_dense": 1, "dense_hidden_size": 40},
)
"""7 matrices in the first block, 4 + 4 x 3 in others: on 4 ranks rounds that are not full."""
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fsdp": ("fsdp", {}, {}),
    "ddp": ("ddp", {}, {}),
    "offload": ("fsdp", {"cpu_offload": True}, {}),
    "experts dealt": ("fsdp", {}, {"ep_config": ExpertParallelConfig(degree=2)}),
    "matrices cut": ("fsdp", {}, {"tp_config": TensorParallelConfig(degree=2)}),
}
RESUMED = ("fsdp", "experts dealt", "matrices cut")
OF_FOUR = {
    **LAYOUTS,
    "hsdp": ("hsdp", {"num_replicas": 2}, {}),
    "hsdp, experts dealt": ("hsdp", {"num_replicas": 2}, LAYOUTS["experts dealt"][2]),
    "hsdp, matrices cut": ("hsdp", {"num_replicas": 2}, LAYOUTS["matrices cut"][2]),
}


def gradient(shape: torch.Size, step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(shape, generator=generator)


def module_of(
    layout: str = "fsdp", world: World | None = None, **options: Any
) -> TransformerTrainModule:
    strategy, sharing, more = OF_FOUR[layout]
    optim = DionConfig(lr=1e-2, **options)
    return build(strategy, world=world, model=EXPERTS, sharing=sharing, optim=optim, **more)  # type: ignore[no-any-return]


def stepped(module: TransformerTrainModule, steps: range = range(STEPS)) -> dict[str, Tensor]:
    """Take steps on gradients that do not depend on the ranks; return weights and state."""
    for step in steps:
        for number, (_, parameter) in enumerate(module.model.named_parameters()):
            parameter.grad = like(torch.empty_like(parameter), parameter)
            assign(parameter.grad, gradient(parameter.shape, step, number))
        module.optimizer.step()
    return {n: x for tensors in full(module).values() for n, x in tensors.items()}


def reference(
    weight: Tensor, basis: Tensor, gradients: list[Tensor], *, lr: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps on a matrix [m, n] with Q^T [r, n], in float64; weight, momentum and Q^T after them."""
    weight, q = weight.double(), basis.double().T
    momentum = torch.zeros_like(weight)
    rows, columns = weight.shape
    for each in gradients:
        b = momentum + each.double()
        p, _ = torch.linalg.qr(b @ q)
        r = b.T @ p
        momentum = b - 0.05 * p @ r.T
        q = r / r.norm(dim=0)
        step = 0.2 * math.sqrt(max(rows, columns)) * p @ q.T
        weight = weight - lr * decay * weight - lr * step
    return weight, momentum, q.T


def test_each_matrix_takes_the_steps_of_a_reference_and_all_else_those_of_adamw() -> None:
    module = module_of(weight_decay=0.1)
    before = {n: x for tensors in full(module).values() for n, x in tensors.items()}
    after = stepped(module)
    plain = stepped(build(model=EXPERTS, optim=AdamWConfig(lr=1e-2)))
    numbers = {name: n for n, (name, _) in enumerate(module.model.named_parameters())}
    parts = {
        name: rows
        for group in module.optimizer.param_groups
        for name, rows in zip(group["names"], group.get("parts", ()), strict=False)
    }
    assert len(parts) == 4 * 3
    for name in numbers:
        if name not in parts:
            assert torch.equal(after[name], plain[name]), name
    for name, rows in parts.items():
        columns = before[name].shape[-1]
        ranks = [rank_of(each, columns, 0.25) for each in rows]
        gradients = [
            gradient(before[name].shape, step, numbers[name]).flatten(0, -2).split(rows)
            for step in range(STEPS)
        ]
        weights, bases, momenta, found = (
            tensors[f"{name}{key}"].flatten(0, -2).split(sizes)
            for tensors, key, sizes in (
                (before, "", rows),
                (before, ".Q", ranks),
                (after, ".momentum_buffer", rows),
                (after, "", rows),
            )
        )
        turned = after[f"{name}.Q"].flatten(0, -2).split(ranks)
        for i, weight in enumerate(weights):
            of_part = [each[i] for each in gradients]
            expected = reference(weight, bases[i], of_part, lr=1e-2, decay=0.1)
            for mine, theirs in zip((found[i], momenta[i], turned[i]), expected, strict=True):
                torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def one_matrix(**options: Any) -> tuple[Any, Dion]:
    model = drawn(MODEL)
    optimizer = DionConfig(
        **{"lr": 1.0, "weight_decay": 0.0, "adjust_lr": "none", **options}
    ).build(model)
    assert isinstance(optimizer, Dion)
    return model.blocks[0].feed_forward.w_down, optimizer


def test_an_update_has_the_rank_that_was_asked_for_and_is_orthonormal_in_the_end() -> None:
    layer, optimizer = one_matrix(rank_fraction=0.25)  # [32, 48]: rank 8
    left, right = (torch.linalg.qr(torch.randn(n, 8, generator=torch.Generator().manual_seed(n)))[0]
                   for n in (32, 48))  # fmt: skip
    given_gradient = left @ torch.diag(2.0 ** torch.arange(8)) @ right.T
    for _ in range(30):
        before = layer.weight.detach().clone()
        layer.weight.grad = given_gradient.clone()
        optimizer.step()
    update = before - layer.weight.detach()
    values = torch.linalg.svdvals(update)
    assert values[8:].max() < 1e-5
    torch.testing.assert_close(update, left @ right.T, rtol=0, atol=1e-3)


def test_what_an_update_has_not_seen_stays_in_the_momentum() -> None:
    layer, optimizer = one_matrix(rank_fraction=0.05, mu=0.0)  # rank 2
    layer.weight.grad = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    before = layer.weight.detach().clone()
    optimizer.step()
    seen = torch.linalg.qr(before - layer.weight.detach())[0][:, :2]  # columns of P
    momentum = optimizer.state[layer.weight]["momentum_buffer"]
    assert (seen.T @ momentum).abs().max() < 1e-4  # taken out: mu is 0
    rest = layer.weight.grad - seen @ (seen.T @ layer.weight.grad)
    torch.testing.assert_close(momentum, rest, rtol=0, atol=1e-4)


def test_without_a_gradient_yet_nothing_moves_and_the_basis_stays() -> None:
    layer, optimizer = one_matrix()
    before = {k: v.clone() for k, v in optimizer.state[layer.weight].items()}
    weight = layer.weight.detach().clone()
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert torch.equal(layer.weight, weight)
    for key, value in before.items():
        assert torch.equal(optimizer.state[layer.weight][key], value)
    assert before["Q"].shape == (8, 48)
    assert 0.5 < before["Q"].std() < 1.5


def test_it_learns_as_adamw_does() -> None:
    adamw, dion = (
        train(build(optim=kind(lr=rate)), [ROWS])
        for kind, rate in ((AdamWConfig, 1e-2), (DionConfig, 2e-2))
    )
    assert dion.losses[-1] < 0.95 * dion.losses[0]
    assert dion.losses[-1] < 1.05 * adamw.losses[-1]


def test_a_run_goes_on_to_the_bit() -> None:
    straight, first, second = module_of(), module_of(), module_of()
    stepped(first, range(2))
    second.load_state_dict(full(first))
    assert digest(stepped(second, range(2, STEPS))) == digest(stepped(straight))


@given(
    cuts=st.lists(st.tuples(st.integers(1, 9), st.sampled_from("-rc")), min_size=1, max_size=3),
    degree=st.integers(1, 3),
    times=st.integers(1, 4),
)
def test_a_stack_is_put_together_from_shards_and_cut_to_them(
    cuts: list[tuple[int, str]], degree: int, times: int
) -> None:
    """Of whole rows, and of matrices that tensor parallelism cuts by rows or by columns."""
    shards, columns = degree * times, 2 * degree
    matrices = [
        Matrix(n, columns, 0, n)
        if how == "-"
        else CutMatrix(n * degree, columns, 0, n * degree, degree=degree, by_columns=how == "c")
        for n, how in cuts
    ]
    stack = Stack.made(*matrices)
    wholes = [torch.randn(each.stop, columns) for each in matrices]
    both = stack.put_together(wholes, shards)
    for found, whole in zip(stack.taken_apart(both, shards), wholes, strict=True):
        assert torch.equal(found, whole)
    sizes = [stack.sizes(shard, shards) for shard in range(shards)]
    held = iter(both.split([size for each in sizes for size in each]))
    for shard in range(shards):
        for matrix, whole, (_, how) in zip(matrices, wholes, cuts, strict=True):
            first = shard % degree * 2 if how == "c" else 0
            mine = whole[matrix.part(shard, shards), first : first + matrix.width]
            assert torch.equal(next(held).view(-1, matrix.width), mine)


def on_ranks(folder: str) -> dict[str, tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]]:
    """On each rank, by layout: the state after some steps, and the shapes of Q here."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    results = {}
    for layout in LAYOUTS if world.size == 2 else OF_FOUR:
        module = module_of(layout, world)
        after = stepped(module)
        state = module.state_dict()["optim"]
        here = {name: tuple(getattr(x, "_local_tensor", x).shape)
                for name, x in state.items() if name.endswith(".Q")}  # fmt: skip
        results[layout] = after, here
    for layout in RESUMED:  # goes on from what one rank saved, and saves
        module = module_of(layout, world)
        state = module.state_dict()
        dcp.load(state, checkpoint_id=Path(folder) / "one")
        module.load_state_dict(state)
        results[f"{layout}, resumed"] = stepped(module, range(2, STEPS)), {}
        dcp.save(module.state_dict(), checkpoint_id=Path(folder) / layout)
    return results


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_end_with_the_state_of_one_and_keep_a_part_of_it(ranks: int, tmp_path: Path) -> None:
    alone = module_of()
    stepped(alone, range(2))
    dcp.save(alone.state_dict(), checkpoint_id=tmp_path / "one")
    expected = stepped(alone, range(2, STEPS))
    for rank in run_ranks(on_ranks, ranks, str(tmp_path)):
        for layout, (found, here) in rank.items():
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(
                    found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )
            for name, shape in here.items():
                whole = expected[name].numel()
                assert math.prod(shape) <= (whole if layout == "ddp" else 0.6 * whole), name
    for layout in RESUMED:
        module = module_of()
        state = module.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / layout)
        module.load_state_dict(state)
        for name, tensor in full(module)["optim"].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)
