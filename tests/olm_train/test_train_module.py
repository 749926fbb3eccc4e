"""The step: exact loss under any cut, clipping, schedule, exact resume; what its options refuse.

The host never waits for the device inside a step. More than one rank: parallel/test_apply.py.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import make_batch
from support.expert_ranks import BALANCES, of_experts
from support.own_parts import PlainSGDConfig, SpikyLoss, StairsConfig
from support.training import (
    LENGTHS,
    MODEL,
    ROWS,
    STEPS,
    build,
    cut,
    digest,
    full,
    micro_batches,
    train,
)
from torch.utils._python_dispatch import TorchDispatchMode

from olm_data.config.convert import as_dict
from olm_data.errors import UsageError, ValidationError
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.loss_config import LossConfig
from olm_train.optim import AnyOptim
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.schedule import WSD, Constant
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.compiling import CompileConfig
from olm_train.parallel.config import TensorParallelConfig
from olm_train.parallel.float8 import Float8Config
from olm_train.stability.gate import NonFinite
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig


@settings(max_examples=15)
@given(st.sets(st.integers(1, ROWS - 1)), st.permutations(range(ROWS)))
def test_loss_and_gradient_do_not_depend_on_the_cut(cuts: set[int], order: list[int]) -> None:
    whole = make_batch([LENGTHS[i] for i in order], vocab_size=8)
    bounds = [0, *sorted(cuts), ROWS]
    parts = [cut(whole, a, b) for a, b in itertools.pairwise(bounds)]
    one, many = build(), build()
    expected, got = one.train_step([whole], 1, STEPS), many.train_step(parts, 1, STEPS)
    for name, value in expected.items():
        assert float(got[name]) == pytest.approx(float(value), rel=1e-5), name
    for ours, theirs in zip(one.model.parameters(), many.model.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_loss_is_the_mean_over_valid_labels_and_its_gradient_follows() -> None:
    whole = make_batch(LENGTHS, vocab_size=8)
    module, reference = build(max_grad_norm=None), build()
    metrics = module.train_step([cut(whole, 0, 3), cut(whole, 3, 8)], 1, STEPS)
    logits = reference.model(whole.input_ids, doc_start=whole.doc_start, positions=whole.positions)
    loss = F.cross_entropy(logits.flatten(0, 1), whole.labels.flatten())  # torch's own mean
    loss.backward()
    assert float(metrics["train/CE loss"]) == pytest.approx(loss.item(), rel=1e-6)
    gradients = [p.grad for p in reference.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    assert float(metrics["optim/total grad norm"]) == pytest.approx(float(norm), rel=1e-5)
    for ours, theirs in zip(module.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-3, atol=1e-7)


def test_metrics_count_the_global_batch_and_stay_on_the_device() -> None:
    metrics = build().train_step(micro_batches(1, [3, 5], build().world), 1, STEPS)
    pieces = [length for row in LENGTHS for length in row]
    assert metrics["train/tokens"] == sum(pieces) == 32 * ROWS
    assert metrics["train/labels"] == sum(length - 1 for length in pieces)
    assert metrics["train/attention pairs"] == sum(n * (n + 1) // 2 for n in pieces)
    known = {"optim/lr", "train/sequence length"}  # without a look at the device
    for name, value in metrics.items():
        assert isinstance(value, torch.Tensor) is (name not in known), name


def test_rate_of_each_step_is_the_schedules() -> None:
    schedule = WSD(warmup=2, decay=3)
    module = build(optim=AdamWConfig(lr=0.5), scheduler=schedule)
    for step in (1, 5, 2, STEPS):
        metrics = module.train_step(micro_batches(step, [ROWS], module.world), step, STEPS)
        assert metrics["optim/lr"] == 0.5 * schedule.lr_factor(step, STEPS)
        assert {group["lr"] for group in module.optimizer.param_groups} == {metrics["optim/lr"]}


def test_a_schedule_in_tokens_takes_the_tokens_of_the_run() -> None:
    schedule = WSD(units="tokens", warmup=100, decay=300)
    module = build(optim=AdamWConfig(lr=0.5), scheduler=schedule)
    batches = micro_batches(1, [ROWS], module.world)
    metrics = module.train_step(batches, 1, STEPS, tokens=(50, 600))
    assert metrics["optim/lr"] == 0.25
    with pytest.raises(ValueError, match="counts tokens"):
        module.train_step(batches, 1, STEPS)


def test_a_rate_of_zero_leaves_the_weights() -> None:
    module = build(optim=AdamWConfig(lr=0.0))
    before = digest(full(module)["model"])
    assert before == digest(train(module, [ROWS], steps=[1]).weights)


def test_clipping_scales_to_the_limit_and_reports_the_norm_before() -> None:
    free, clipped = build(max_grad_norm=None), build(max_grad_norm=0.01)
    norms = []
    for module in (free, clipped):
        metrics = module.train_step(micro_batches(1, [ROWS], module.world), 1, STEPS)
        gradients = [p.grad for p in module.model.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        reported = float(metrics["optim/total grad norm"])
    assert reported == pytest.approx(norms[0], rel=1e-6)
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("adamw", "halt"), ("adamw", "skip"), ("dion", "skip"), ("lion", "skip")),
        *(("muon", "skip"), ("skip_step_adamw", "skip"), ("skip_step_lion", "halt")),
    ],
)
def test_a_non_finite_step_changes_nothing_with_any_optimiser(name: str, policy: str) -> None:
    kinds = {kind.name: kind for kind in get_args(AnyOptim)}
    module = build(optim=kinds[name](lr=1e-3), non_finite=NonFinite(policy))
    train(module, [ROWS], steps=[1])
    before = {part: digest(tensors) for part, tensors in full(module).items()}
    for poison in (math.nan, math.inf):
        handle = module.model.norm.register_forward_hook(lambda _m, _a, out, x=poison: out * x)
        metrics = module.train_step(micro_batches(2, [4, 4], module.world), 2, STEPS)
        handle.remove()
        assert float(metrics["optim/non-finite"]) == 1
        after = full(module)
        assert digest(after["model"]) == before["model"]
        if not name.startswith("skip_step"):  # their history counts every finite step
            assert digest(after["optim"]) == before["optim"]
    metrics = module.train_step(micro_batches(2, [4, 4], module.world), 2, STEPS)
    assert float(metrics["optim/non-finite"]) == 0
    moved = digest(full(module)["model"]) != before["model"]
    assert moved == (policy == "skip")  # halt: nothing moves until a good state is loaded
    module.load_state_dict(full(module))
    module.train_step(micro_batches(2, [4, 4], module.world), 2, STEPS)
    assert digest(full(module)["model"]) != before["model"]


def test_resume_is_bit_identical() -> None:
    straight = build()
    expected = train(straight, [3, 5])
    first = build()
    train(first, [3, 5], steps=[1, 2])
    second = build()
    second.load_state_dict(full(first))
    rest = train(second, [3, 5], steps=[3, 4, 5, 6])
    assert rest.losses == expected.losses[2:]
    assert rest.norms == expected.norms[2:]
    for part, tensors in full(straight).items():
        assert digest(full(second)[part]) == digest(tensors)


def test_saving_before_the_first_step_changes_nothing() -> None:
    saved = build()
    restored = build()
    restored.load_state_dict(full(saved))
    one, other, plain = (train(each, [ROWS], [1, 2]) for each in (saved, restored, build()))
    assert one.losses == other.losses == plain.losses


def test_state_dict_is_the_live_tensors_and_nothing_but_tensors() -> None:
    module = build()
    state = module.state_dict()
    assert all(type(x) is torch.Tensor for tensors in state.values() for x in tensors.values())
    state["model"]["norm.weight"].fill_(3.0)
    assert (module.model.norm.weight == 3).all()
    assert set(state["optim"]) == {
        f"{name}.{key}" for name in state["model"] for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_weights_alone_can_be_loaded() -> None:
    source, target = build(), build()
    train(source, [ROWS], steps=[1])
    before = digest(full(target)["optim"])
    target.load_state_dict({"model": full(source)["model"]})
    assert digest(full(target)["model"]) == digest(full(source)["model"])
    assert digest(full(target)["optim"]) == before


@pytest.mark.parametrize(
    ("part", "message"),
    [("missing", "missing norm.weight"), ("extra", "unexpected nose"), ("shape", "has shape")],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(part: str, message: str) -> None:
    source, target = build(), build()
    train(source, [ROWS], steps=[1])
    state = full(source)
    if part == "missing":
        del state["model"]["norm.weight"]
    elif part == "extra":
        state["model"]["nose"] = torch.zeros(1)
    else:
        state["model"]["norm.weight"] = torch.ones(7)
    before = digest(full(target)["model"])
    with pytest.raises(ValidationError, match=message):
        target.load_state_dict(state)
    assert digest(full(target)["model"]) == before


def test_eval_batch_sums_over_valid_labels_without_touching_anything() -> None:
    module = build()
    batch = make_batch(LENGTHS, vocab_size=8)
    before = {part: digest(tensors) for part, tensors in full(module).items()}
    loss, count = module.eval_batch(batch)
    assert (loss.dtype, count.dtype) == (torch.float64, torch.int64)
    assert {part: digest(tensors) for part, tensors in full(module).items()} == before
    assert all(p.grad is None for p in module.model.parameters())
    metrics = module.train_step([batch], 1, STEPS)
    assert float(loss / count) == pytest.approx(float(metrics["train/CE loss"]), rel=1e-6)
    assert count == metrics["train/labels"]


@pytest.mark.slow
def test_compiled_blocks_train_alike_under_the_same_names() -> None:
    model = replace(MODEL, n_layers=1)
    plain, compiled = build(model=model), build(model=model, compile_model=True)
    assert full(plain)["model"].keys() == full(compiled)["model"].keys()
    torch._dynamo.utils.counters.clear()  # other tests of this process break graphs on purpose
    expected, got = (train(module, [4, 4], steps=[1, 2, 3]) for module in (plain, compiled))
    # Two whole graphs, block and loss: no break, and none again for other data of the same shape.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert (plain.loss.name, compiled.loss.name) == ("plain", "compiled")
    assert not torch._dynamo.utils.counters["graph_break"]
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert got.norms == pytest.approx(expected.norms, rel=1e-4)


def test_precision_of_fp32_products_is_set_to_what_the_configuration_says() -> None:
    try:
        for precision in ("medium", "high", "highest"):
            build(float32_matmul_precision=precision)
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("step", "parts"), [(0, [ROWS]), (STEPS + 1, [ROWS]), (1, [])])
def test_steps_outside_the_run_and_empty_batches_are_refused(step: int, parts: list[int]) -> None:
    module = build()
    batches: list[Any] = micro_batches(1, parts, module.world) if parts else []
    with pytest.raises(ValueError, match="step"):
        module.train_step(batches, step, STEPS)


def test_a_decoder_with_its_weights_trains_as_one_of_that_shape_and_seed() -> None:
    given = Decoder(MODEL)
    init_parameters(given, 5)
    own = TransformerTrainModule(build().config, given.to(torch.float64), seed=99)
    assert own.model is given
    drawn = build()
    whole = make_batch(LENGTHS, vocab_size=8)
    for step in (1, 2):
        ours = own.train_step([whole], step, STEPS)
        theirs = drawn.train_step([whole], step, STEPS)
        assert {n: float(v) for n, v in ours.items()} == {n: float(v) for n, v in theirs.items()}
    assert digest(own.model.state_dict()) == digest(drawn.model.state_dict())
    assert {parameter.dtype for parameter in given.parameters()} == {torch.float32}


def test_parts_of_ones_own_are_taken_and_written_with_their_import_path() -> None:
    config = TransformerTrainModuleConfig(
        rank_microbatch_size=8,
        optim=PlainSGDConfig(),  # type: ignore[arg-type]
        scheduler=StairsConfig(every=2),  # type: ignore[arg-type]
        loss=SpikyLoss(factor=2.0),  # type: ignore[arg-type]
    )
    plain = as_dict(config)
    names = {key: plain[key]["name"] for key in ("optim", "scheduler", "loss")}
    assert names == {
        "optim": "support.own_parts:PlainSGDConfig",
        "scheduler": "support.own_parts:StairsConfig",
        "loss": "support.own_parts:SpikyLoss",
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        (
            {"compile_model": False, "compile_config": CompileConfig(fullgraph=False)},
            "no effect without compile_model",
        ),
        (
            {
                "tp_config": TensorParallelConfig(degree=2),
                "float8_config": Float8Config(ao_recipe="mxfp8"),
            },
            "tp_config does not go with ao_recipe: mxfp8",
        ),
        ({"loss": StairsConfig(every=2)}, "loss is"),
    ],
)
def test_options_that_do_not_go_are_refused(options: dict[str, Any], says: str) -> None:
    assert TransformerTrainModuleConfig(rank_microbatch_size=64).scheduler == Constant()
    with pytest.raises(UsageError, match=says):
        TransformerTrainModuleConfig(rank_microbatch_size=64, **options)


WAITING = {
    "_local_scalar_dense": "item(), float(), bool()",
    "nonzero": "shape of values",
    "masked_select": "shape of values",
    "_unique2": "shape of values",
    "is_nonzero": "bool()",
    "equal": "torch.equal()",
}


class Syncs(TorchDispatchMode):
    """Counts operators that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name, options = func._opname, kwargs or {}
        # A mask as an index is a nonzero in disguise.
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if name in WAITING or masks:
            self.calls[name] += 1
        return func(*args, **options)


def count(steps: int, **options: Any) -> Counter[str]:
    """Waits of `steps` steps after the first, which makes the optimiser's state."""
    module = build(**options)
    module.train_step(micro_batches(1, [3, 5], module.world), 1, 6)
    batches = [micro_batches(step, [3, 5], module.world) for step in range(2, 2 + steps)]
    with Syncs() as syncs:
        for step, parts in enumerate(batches, start=2):
            module.train_step(parts, step, 6)
    return syncs.calls


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": LossConfig(name="chunked", chunk_size=50, z_loss_multiplier=1e-3)},
        {"ac_config": ActivationCheckpointingConfig(mode="selected_ops")},
        {"param_dtype": "bfloat16"},
        *({"model": of_experts(**balance)} for balance in BALANCES.values()),
    ],
    ids=["default", "chunked", "selected_ops", "bfloat16", *BALANCES],
)
def test_a_step_never_makes_the_host_wait(options: Any) -> None:
    assert count(2, **options) == Counter()


def test_the_count_sees_a_look() -> None:
    with Syncs() as syncs:
        x = torch.ones(3)
        float(x.sum())
        x[x > 0]
        bool(x.sum() > 2)
    assert sum(syncs.calls.values()) == 3
