"""Compiled runs pass any number of kinds of layer, sequence lengths and modes: a graph for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.batches import make_batch
from support.training import MODEL, build

from olm_train.model.compiled import CompiledByKind, kind_of
from olm_train.model.loss_config import LossConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.train_module import TransformerTrainModule

LENGTHS = (8, 12, 16)
MIXED = {
    "n_layers": 6,
    "positions": {"no_rope_layer_interval": 2},
    "attention": {"sliding_window": (5, 7, -1)},
}
"""Six blocks: with and without RoPE, two windows and none: no two are alike by both."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of the graphs made, by a compiler that runs them as they are."""
    sizes: list[int] = []
    plain = torch.compile

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    def compile_plainly(function: Any, **options: Any) -> Any:
        options.pop("mode", None)
        return plain(function, backend=backend, **options)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", compile_plainly)
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    yield sizes
    torch._dynamo.reset()


def compiled(**options: Any) -> TransformerTrainModule:
    model = MODEL.changed(**MIXED)
    return build(model=model, compile_model=True, loss=LossConfig(name="compiled"), **options)


def walk(module: TransformerTrainModule, lengths: tuple[int, ...] = LENGTHS) -> list[float]:
    """Train on rows of each length, two steps, evaluated after each one."""
    losses = []
    for step, length in enumerate([*lengths, *lengths], 1):
        documents = [[3, length - 3], [length]]
        batch = make_batch(documents, vocab_size=97, seed=step)
        losses.append(float(module.train_step([batch], step, 99)["train/CE loss"]))
        loss, count = module.eval_batch(batch)
        losses.append(float(loss / count))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selected_ops"])
def test_lengths_kinds_and_modes_are_compiled_once_each(mode: Any, graphs: list[int]) -> None:
    checkpointing = ActivationCheckpointingConfig(mode=mode)
    losses = walk(compiled(ac_config=checkpointing))
    # sdpa has one graph for all windows, and one without RoPE; the loss is compiled in training
    assert len(graphs) == len(LENGTHS) * (2 * 2 + 1)
    plain = walk(build(model=MODEL.changed(**MIXED)))
    assert losses == pytest.approx(plain, rel=1e-5)


def test_other_modules_and_layers_alike_share_the_graphs(graphs: list[int]) -> None:
    first = walk(compiled(), (8, 12))
    made = len(graphs)
    assert walk(compiled(), (8, 12)) == first
    assert len(graphs) == made == 2 * (2 * 2 + 1)


def test_the_limit_is_hit_by_one_code_object_for_all(graphs: list[int]) -> None:
    """What the copies are for: the check sees the limit."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    sizes = range(1, torch._dynamo.config.recompile_limit + 3)
    single, by_kind = torch.compile(double, dynamic=False, fullgraph=True), CompiledByKind(double)
    for size in sizes:
        assert torch.equal(by_kind(torch.ones(size)), torch.full((size,), 2.0))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        [single(torch.ones(size)) for size in sizes]


def test_a_kind_is_all_that_a_static_graph_depends_on() -> None:
    x = torch.ones(2, 3)
    same = [(x, 1, None, ("a",)), (x.clone(), 1, None, ("a",))]
    other = [
        (x[:1], 1, None, ("a",)), (x.double(), 1, None, ("a",)), (x, 2, None, ("a",)),
        (x, 1, x, ("a",)), (x, 1, None, ("b",)), (x.clone().requires_grad_(), 1, None, ("a",)),
    ]  # fmt: skip
    assert kind_of(same[0]) == kind_of(same[1])
    assert len({kind_of(each) for each in (*same, *other)}) == 1 + len(other)
    assert kind_of({"a": object()}) == kind_of({"a": object()})
