"""What the probe says of activations is what hooks see; and it leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training import MODEL, build, micro_batches
from torch import nn

from olm_train.extensions.monitors.gap_monitor import ActivationProbe, as_rows
from olm_train.model.config import DecoderConfig
from olm_train.model.tap import row_of
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig

GPT = DecoderConfig(
    vocab_size=97,
    d_model=32,
    n_layers=2,
    n_heads=4,
    block="peri_norm",
    feed_forward="gelu",
    norm="layer_norm",
)


def step(module: Any, number: int = 1) -> float:
    return float(module.train_step(micro_batches(number, [3, 5], module.world), number, 6)[LOSS])


LOSS = "train/CE loss"


@pytest.mark.parametrize("options", [{}, {"model": GPT}], ids=["default", "gpt"])
def test_rows_are_those_that_hooks_see(options: dict[str, Any]) -> None:
    module = build(**options)
    probe = ActivationProbe(module.model, gradients=True)
    probe.begin(torch.device("cpu"))
    step(module)
    found = dict(zip(("forward", "backward"), probe.end(), strict=True))
    expected = {name: torch.zeros_like(rows) for name, rows in found.items()}

    def add(kind: str, name: str, x: torch.Tensor) -> None:
        own, row = expected[kind][probe.names.index(name)], row_of(x.detach())
        own[:3] += row[:3]
        own[3] = torch.maximum(own[3], row[3])

    def watch(name: str, each: nn.Module) -> None:
        def forward(_module: nn.Module, _arguments: Any, output: torch.Tensor) -> None:
            add("forward", name, output)
            output.register_hook(lambda gradient: add("backward", name, gradient))

        each.register_forward_hook(forward)

    other = build(**options)
    containers = {"attention", "feed_forward"}
    for name, each in other.model.named_modules():
        last = name.rpartition(".")[2]
        if name in probe.names and last not in containers:
            watch(name, each)
    step(other)
    for kind, rows in expected.items():
        torch.testing.assert_close(found[kind], rows, rtol=1e-6, atol=1e-9)
    assert (found["forward"][:, 0] > 0).sum() >= 2 + 2 * 7


@pytest.mark.parametrize("mode", ["none", "full", "selected_ops"])
def test_looking_changes_no_bit_and_leaves_nothing_behind(mode: Any) -> None:
    options = {"ac_config": ActivationCheckpointingConfig(mode=mode)}
    module, other = build(**options), build(**options)
    before = [vars(block).get("forward") for block in module.model.blocks]
    probe, losses = ActivationProbe(module.model, gradients=True), []
    for number in (1, 2, 3):
        probe.begin(torch.device("cpu"))
        losses.append(step(module, number))
        assert (probe.end()[1][:, 3] > 0).any()
    assert losses == [step(other, number) for number in (1, 2, 3)]
    assert [vars(block).get("forward") for block in module.model.blocks] == before


def test_without_gradients_there_are_none() -> None:
    module = build()
    probe = ActivationProbe(module.model, gradients=False)
    probe.begin(torch.device("cpu"))
    step(module)
    rows, gradients = probe.end()
    assert (rows[:, 3] > 0).any()
    assert not gradients.any()
    assert as_rows([rows, gradients]).sums.shape[0] == 2 * len(probe.names)


@pytest.mark.slow  # it compiles
def test_a_watched_block_compiles_as_one_graph_and_training_has_the_same_bits() -> None:
    """In bfloat16, where another fusion would round otherwise."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    options: dict[str, Any] = {"model": replace(MODEL, n_layers=1), "param_dtype": "bfloat16"}
    module, other = (build(compile_model=True, **options) for _ in range(2))
    probe, losses = ActivationProbe(module.model, gradients=True), []
    for number in (1, 2):
        probe.begin(torch.device("cpu"))
        losses.append(step(module, number))
        rows, gradients = probe.end()
        assert (rows[:, 3] > 0).sum() == (gradients[:, 3] > 0).sum() > 2
    assert losses == [step(other, number) for number in (1, 2)]
    assert counters["stats"]["unique_graphs"] >= 1
    assert dict(counters["graph_break"]) == {}
