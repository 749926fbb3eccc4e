"""Activation checkpointing: the same bits, fewer tensors kept, matrix products not done twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training import MODEL, build, full, micro_batches, train
from torch.utils._python_dispatch import TorchDispatchMode

from olm_data.errors import UsageError
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.compiling import CompileConfig

pytestmark = pytest.mark.xdist_group("activations")  # its fixtures are made once
LAYERS = 4
CONFIGS = {
    "none": ActivationCheckpointingConfig(),
    "full": ActivationCheckpointingConfig(mode="full"),
    "selected_blocks": ActivationCheckpointingConfig(mode="selected_blocks", block_interval=2),
    "selected_ops": ActivationCheckpointingConfig(mode="selected_ops"),
}


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def observe(mode: str) -> tuple[int, Counter[str], Any]:
    """Bytes autograd keeps of a forward pass, operators of a step, and what two steps leave."""
    module = build(model=replace(MODEL, n_layers=LAYERS), ac_config=CONFIGS[mode])
    (batch,) = micro_batches(1, [8], module.world)
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    with Operators() as operators:
        module.train_step([batch], 1, 6)
    run = train(module, [3, 5], steps=[2, 3])
    return sum(kept.values()), operators.calls, (run.losses, run.norms, full(module))


@pytest.fixture(scope="module")
def observed() -> dict[str, tuple[int, Counter[str], Any]]:
    return {mode: observe(mode) for mode in CONFIGS}


@pytest.mark.parametrize("mode", ["full", "selected_blocks", "selected_ops"])
def test_losses_gradients_and_weights_keep_their_bits(mode: str, observed: Any) -> None:
    losses, norms, state = observed["none"][2]
    assert observed[mode][2][:2] == (losses, norms)
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            assert torch.equal(observed[mode][2][2][part][name], tensor), name


def test_less_is_kept_the_more_blocks_are_checkpointed(observed: Any) -> None:
    kept = {mode: result[0] for mode, result in observed.items()}
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["full"] < kept["selected_blocks"] < kept["none"]


def test_only_what_was_not_kept_is_computed_again(observed: Any) -> None:
    def products(mode: str) -> int:
        return observed[mode][1]["mm"]

    a_block = 3  # qkv, out, gate and up; the result of the last one, down, nobody asks for
    assert products("full") == products("none") + LAYERS * a_block
    assert products("selected_blocks") == products("none") + LAYERS // 2 * a_block
    assert products("selected_ops") == products("none")
    silu = {mode: result[1]["silu"] for mode, result in observed.items()}
    assert silu["selected_ops"] == silu["full"] == 2 * silu["none"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mode": "ful"}, "did you mean 'full'"),
        ({"block_interval": 2}, "no effect without mode: selected_blocks"),
        ({"mode": "selected_blocks"}, "needs it"),
        ({"mode": "selected_blocks", "block_interval": 0}, "block_interval is at least 1, not 0"),
        (
            {"mode": "budget", "activation_memory_budget": 2.0},
            "activation_memory_budget is at least 0 and at most 1",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ActivationCheckpointingConfig(**options)


def test_what_needs_the_compiler_is_refused_without_it() -> None:
    budget = ActivationCheckpointingConfig(mode="budget", activation_memory_budget=0.5)
    with pytest.raises(UsageError, match="needs compiled blocks"):
        build(ac_config=budget, compile_model=False)
    with pytest.raises(UsageError, match="no effect without compile_model"):
        build(compile_config=CompileConfig(fullgraph=False), compile_model=False)


def test_the_budget_holds_while_a_block_is_called_and_no_longer() -> None:
    seen = []
    config = ActivationCheckpointingConfig(mode="budget", activation_memory_budget=0.25)

    def forward(x: int) -> int:
        seen.append(torch._functorch.config.activation_memory_budget)
        return x

    assert config.around_compiled(forward)(3) == 3
    assert seen == [0.25]
    assert torch._functorch.config.activation_memory_budget == 1.0


class Broken(torch.nn.Module):
    """A block that no graph can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


def test_a_block_that_is_not_one_graph_is_refused_unless_that_is_allowed() -> None:
    x, checkpointing = torch.ones(2), ActivationCheckpointingConfig()
    for fullgraph in (False, True):
        torch._dynamo.reset()
        blocks = torch.nn.ModuleList([Broken()])
        CompileConfig(fullgraph=fullgraph).apply(blocks, checkpointing)
        if fullgraph:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                blocks[0](x)
        else:
            assert blocks[0](x) is x


def test_the_mode_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, found = torch.compile, {}
    for mode in ("default", "max-autotune-no-cudagraphs"):
        made: list[Any] = []

        def keep(*args: Any, _made: list[Any] = made, **options: Any) -> Any:
            _made.append(plain(*args, **options))
            return lambda x: x

        monkeypatch.setattr(torch, "compile", keep)
        blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        config = CompileConfig(mode=mode, fullgraph=False)  # type: ignore[arg-type]
        config.apply(blocks, ActivationCheckpointingConfig())
        blocks[0](torch.ones(2))
        options = made[0].get_compiler_config()
        found[mode] = bool(options and options["max_autotune"])
    assert found == {"default": False, "max-autotune-no-cudagraphs": True}
    with pytest.raises(UsageError, match=r"mode is one of default, .*, not 'fast'"):
        CompileConfig(mode="fast")  # type: ignore[arg-type]
