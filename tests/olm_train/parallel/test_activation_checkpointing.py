"""Blocks computed again, or compiled: the same bits, less kept, a graph for each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import make_batch
from support.model_options import CONFIG, stirred
from support.training import MODEL, build, full, micro_batches, train
from torch.utils._python_dispatch import TorchDispatchMode

from olm_data.errors import UsageError
from olm_train.model.compiled import CompiledByKind, kind_of
from olm_train.model.loss_config import LossConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.compiling import CompileConfig, uncompiled
from olm_train.train_module import TransformerTrainModule

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


def test_uncompiled_compiles_nothing_and_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(CompiledByKind, "__call__", lambda self, *a, **k: calls.append(a) or a[0])
    model = stirred(replace(CONFIG, n_layers=2))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(ids)
        CompileConfig().apply(model.blocks, ActivationCheckpointingConfig())
        compiled = [vars(block)["forward"] for block in model.blocks]
        with uncompiled(model.blocks):
            assert torch.equal(model(ids), expected)
        with pytest.raises(ZeroDivisionError), uncompiled(model.blocks):
            raise ZeroDivisionError
        assert not calls
        assert [vars(block)["forward"] for block in model.blocks] == compiled
        model(ids)
        assert len(calls) == 2


def test_blocks_that_are_not_compiled_are_called_as_they_are() -> None:
    model = stirred(CONFIG)
    with torch.no_grad(), uncompiled(model.blocks):
        model(torch.tensor([[1, 2, 3]]))
    assert "forward" not in vars(model.blocks[0])
