"""Statistics of gradients, activations and parameters, and gradients on disk; no trace is left."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.probe_checks import (
    KINDS,
    LOSS,
    TARGETS,
    Steps,
    everything,
    same,
    sharded_statistics,
    train_and_look,
)
from support.runs import metrics, one_step_trainer
from support.training import MODEL, build, digest, full, micro_batches
from torch import nn

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.run_log.metric_names import GAP
from olm_train.checkpoint.manifest import INDEX_NAME
from olm_train.checkpoint.tensors import Index
from olm_train.distributed.world import World
from olm_train.extensions.monitors.gap_monitor import (
    SMALL,
    ActivationProbe,
    GAPMonitorCallback,
    as_rows,
    finish,
    lost_updates,
    measure,
    underflows_of,
)
from olm_train.extensions.monitors.gradient_files import (
    read_gradients,
    step_folder,
    write_gradients,
)
from olm_train.model.config import DecoderConfig
from olm_train.model.tap import row_of
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig

WEIGHT = "blocks.1.attention.w_out.weight"


@pytest.fixture(scope="module")
def looked() -> list[dict[str, float]]:
    return Steps(build(), everything()).run([3, 5])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(train_and_look, 2, str(folder))


def test_names_are_those_of_parameters_and_modules_by_target_and_kind(
    looked: list[dict[str, float]],
) -> None:
    found = {name for name in looked[0] if name.startswith(GAP)}
    for target in TARGETS:
        assert any(name.startswith(f"gap/{target}/") for name in found)
    assert {f"gap/updates/{WEIGHT}/{kind}" for kind in KINDS} <= found
    assert f"gap/opt_state/{WEIGHT}.exp_avg/max" in found
    for name in ("embeddings", "norm", "blocks.0", "blocks.1.feed_forward.w_down"):
        for target in ("activations", "activation_grads"):
            kinds = {n.rpartition("/")[2] for n in found if n.startswith(f"gap/{target}/{name}/")}
            assert kinds == {"max", "mean", "var"}
    assert not any(math.isnan(value) for value in looked[0].values())


def test_gradients_are_those_before_clipping_and_updates_what_the_step_added() -> None:
    kinds: Any = ["rms", "ratio", "max"]
    monitor = GAPMonitorCallback(
        interval=1, targets=["grads", "updates"], kinds=kinds, dump_gradients=False
    )
    module = build(max_grad_norm=1e-3)
    before = full(module)["model"][WEIGHT]
    (line,) = Steps(module, [monitor]).run([3, 5], steps=1)
    norm = line["optim/total grad norm"]
    assert norm > 1e-2  # clipped
    square = sum(
        value**2 * parameter.numel()
        for name, parameter in module.model.named_parameters()
        for value in [line[f"gap/grads/{name}/rms"]]
    )
    assert math.isclose(math.sqrt(square), norm, rel_tol=1e-5)
    change = full(module)["model"][WEIGHT] - before
    assert math.isclose(line[f"gap/updates/{WEIGHT}/max"], float(change.abs().max()), rel_tol=1e-6)
    ratio = float(change.norm() / before.norm())
    assert math.isclose(line[f"gap/updates/{WEIGHT}/ratio"], ratio, rel_tol=1e-5)
    assert not any("/params/" in name for name in line)


@pytest.mark.xdist_group("parallel")
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_ranks_see_what_one_rank_sees_and_train_the_same_bits(
    strategy: str, ranks: tuple[Path, list[dict[str, Any]]], looked: list[dict[str, float]]
) -> None:
    _, (first, second) = ranks
    lines, weights = first[strategy, "with"]
    bare, plain = first[strategy, "without"]
    assert [line[LOSS] for line in lines] == [line[LOSS] for line in bare]
    assert digest(weights) == digest(plain)
    assert lines == second[strategy, "with"][0]
    # Ranks add up in another order than one alone, so gradients differ by rounding.
    names = [name for name in looked[0] if name.startswith(GAP)]
    assert {name for name in lines[0] if name.startswith(GAP)} == set(names)
    for name in names:
        if "params" in name:
            assert same(lines[0][name], looked[0][name], 1e-6), name
        elif name.endswith("max") and "updates" not in name and "opt_state" not in name:
            assert same(lines[0][name], looked[0][name], 1e-3), name


@pytest.mark.xdist_group("parallel")
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_dumped_gradients_of_ranks_are_put_together(
    strategy: str, ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, (results, _) = ranks
    for first_n in (None, 3):
        found = read_gradients(folder / f"{strategy}-{first_n}/gradients/step00000002")
        for name, gradient in results[strategy, "gradients"].items():
            wanted = gradient[tuple(slice(0, first_n) for _ in gradient.shape)]
            assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [1, 2, 3, 4]),
        ({"dump_gradients_start_step": 2}, [2, 3, 4]),
        ({"dump_gradients_end_step": 3}, [1, 2, 3]),
        ({"dump_gradients_start_step": 1, "dump_gradients_step_interval": 2}, [1, 3]),
    ],
)
def test_gradients_are_written_at_the_steps_that_are_asked_for(
    options: dict[str, int], steps: list[int], tmp_path: Path
) -> None:
    monitor = GAPMonitorCallback(monitor=False, dump_gradients=True, **options)  # type: ignore[arg-type]
    run = Steps(build(), [monitor])
    run.work_dir = tmp_path  # type: ignore[attr-defined]
    run.pause = torch.no_grad  # type: ignore[attr-defined]  # a context that does nothing here
    lines = run.run([3, 5], steps=4)
    names = sorted(path.name for path in (tmp_path / "gradients").iterdir())
    assert names == [f"step{step:08d}" for step in steps]
    assert not any(name.startswith(GAP) for line in lines for name in line)
    found = read_gradients(tmp_path / "gradients" / names[-1])
    norm = torch.nn.utils.get_total_norm(found.values())
    assert math.isclose(float(norm), lines[steps[-1] - 1]["optim/total grad norm"], rel_tol=1e-5)


def test_statistics_come_at_the_interval_only() -> None:
    lines = Steps(build(), [GAPMonitorCallback(interval=2)]).run([8], steps=4)
    assert [any(n.startswith(GAP) for n in line) for line in lines] == [False, True] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"monitor": False}, "neither monitors nor dumps"),
        ({"dump_gradients_end_step": 3}, "no effect without dump_gradients"),
        ({"dump_gradients_save_first_n": 3}, "no effect without dump_gradients"),
        ({"targets": []}, "is empty"),
        ({"kinds": ["ratio"]}, "one of updates"),
    ],
)
def test_what_would_have_no_effect_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GAPMonitorCallback(**options)


def test_a_module_that_does_not_tell_is_read_after_clipping_and_that_is_said() -> None:
    module = build(max_grad_norm=1e-3)
    run = Steps(module, [GAPMonitorCallback(interval=1, targets=["grads"], kinds=["rms"])])
    module.optimizer.register_step_pre_hook(lambda *_: run.call("pre_optim_step"))
    call = run.call
    run.call = lambda hook, *a: None if hook == "post_backward" else call(hook, *a)  # type: ignore[method-assign]
    lines = run.run([8], steps=2)
    assert ["after clipping" in said for said in run.said] == [True]
    norm = max(lines[0][f"gap/grads/{n}/rms"] for n, _ in module.model.named_parameters())
    assert norm < 1e-3


def test_another_model_has_everything_but_activations() -> None:
    module = build()
    run = Steps(module, [GAPMonitorCallback(interval=1)])
    decoder, module.model = module.model, nn.Linear(3, 3)  # type: ignore[assignment]
    run.call("pre_train")
    module.model = decoder
    assert ["no activations" in said for said in run.said] == [True]


def test_a_run_logs_them_and_writes_gradients_to_its_folder(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    option = "--trainer.callbacks.gap_monitor={interval: 1, dump_gradients: true}"
    one_step_trainer(tiny_mixture, tmp_path, option).fit()
    (line,) = metrics(tmp_path)
    assert line["gap/grads/lm_head.weight/max"] > 0
    (folder,) = tmp_path.rglob("gradients/step00000001")
    norm = torch.nn.utils.get_total_norm(read_gradients(folder).values())
    assert math.isclose(float(norm), line["optim/total grad norm"], rel_tol=1e-5)


SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@pytest.mark.xdist_group("parallel")
@given(st.lists(SHAPES, min_size=8, max_size=40), st.integers(0, 1 << 30))
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_sharded_tensors_have_the_statistics_of_whole_ones(
    shapes: list[tuple[int, ...]], seed: int
) -> None:
    assert run_ranks(sharded_statistics, 2, shapes, seed) == [True, True]


def test_a_large_tensor_is_measured_as_a_small_one() -> None:
    tensor = torch.randn(SMALL + 7, generator=torch.Generator().manual_seed(1)) * 3 + 1
    tensor[:1000] = 0
    found = finish(measure([tensor], World()), World())
    exact = tensor.double()
    for value, wanted in (
        (found.max, exact.abs().max()),
        (found.mean, exact.mean()),
        (found.var, exact.var()),
        (found.rms, exact.square().mean().sqrt()),
        (found.zeros, torch.tensor(1000 / len(tensor), dtype=torch.float64)),
    ):
        torch.testing.assert_close(value[0], wanted, rtol=1e-6, atol=0)


def test_what_is_not_finite_shows() -> None:
    tensors = [torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])]
    found = finish(measure(tensors, World()), World())
    assert math.isnan(found.max[0])
    assert math.isnan(found.mean[0])
    assert found.max[1] == math.inf


def test_underflows_are_small_numbers_and_updates_without_effect() -> None:
    (small,) = underflows_of([torch.tensor([0.0, 1e-39, -1e-40, 1e-30])])
    assert small == 2
    before = torch.tensor([1.0, 1.0, 1.0])
    (lost,) = lost_updates([before], [before + torch.tensor([0.0, 1e-5, 0.5])])
    assert lost == 1


GRADIENTS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(2.0),
    "b": torch.ones(5, dtype=torch.bfloat16),
}


def test_gradients_come_back_with_their_shapes_and_types(tmp_path: Path) -> None:
    folder = write_gradients(tmp_path, 12, GRADIENTS, World(), None)
    assert folder == step_folder(tmp_path, 12) == tmp_path / "gradients/step00000012"
    assert sorted(p.name for p in folder.iterdir()) == [INDEX_NAME, "rank00000.safetensors"]
    found = read_gradients(folder)
    assert found.keys() == GRADIENTS.keys()
    for name, gradient in GRADIENTS.items():
        assert torch.equal(found[name], gradient)
        assert found[name].dtype == gradient.dtype
    index = Index.decode((folder / INDEX_NAME).read_bytes(), "index")
    assert index.values == {"step": 12, "first_n": None}


def test_the_first_entries_of_each_dimension_are_kept(tmp_path: Path) -> None:
    found = read_gradients(write_gradients(tmp_path, 1, GRADIENTS, World(), 2))
    assert torch.equal(found["a.weight"], GRADIENTS["a.weight"][:2, :2])
    assert found["b"].shape == (2,)


def test_a_second_attempt_at_a_step_replaces_the_first(tmp_path: Path) -> None:
    folder = write_gradients(tmp_path, 1, GRADIENTS, World(), None)
    (folder / "rank00007.safetensors").write_bytes(b"of more ranks")
    write_gradients(tmp_path, 1, {"b": GRADIENTS["b"]}, World(), None)
    assert sorted(p.name for p in folder.iterdir()) == [INDEX_NAME, "rank00000.safetensors"]
    assert list(read_gradients(folder)) == ["b"]


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    folder = write_gradients(tmp_path, 1, GRADIENTS, World(), None)
    index, path = folder / INDEX_NAME, folder / "rank00000.safetensors"
    whole, data = index.read_bytes(), path.read_bytes()
    index.unlink()
    with pytest.raises(InputError, match="not written to the end"):
        read_gradients(folder)
    for wrong in (
        whole.replace(b'"version":1', b'"version":9'),
        b"[]",
        whole.replace(b"rank00000", b"rank00001"),
        whole.replace(b"[5]", b"[6]"),
    ):
        index.write_bytes(wrong)
        with pytest.raises(ValidationError, match="index of the tensors is damaged"):
            read_gradients(folder)
    index.write_bytes(whole)
    path.write_bytes(data[:40])
    with pytest.raises(ValidationError, match="beyond the end"):
        read_gradients(folder)


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
