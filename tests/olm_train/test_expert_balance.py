"""Experts over a step: counted once, biased once, and balanced however the step is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import make_batch
from support.expert_ranks import BALANCES, RECOMPUTED, of_experts
from support.training import ROWS, build, digest, full, micro_batches, two_steps
from torch import Tensor

from olm_data.errors import UsageError
from olm_train.data.batch import Batch
from olm_train.estimate.device_defaults import Capability, resolve
from olm_train.extensions.monitors.gap_monitor import ActivationProbe
from olm_train.model.loss import IGNORE_INDEX
from olm_train.model.mixture import Router
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig

CUTS = {"whole": [8], "two": [3, 5], "rows": [1] * 8}


def biases(module: TransformerTrainModule) -> list[Tensor]:
    found = [each.bias for each in module.model.modules() if isinstance(each, Router)]
    return [bias.clone() for bias in found if bias is not None]


def stepped(module: TransformerTrainModule, rows: list[int], step: int = 1) -> dict[str, float]:
    metrics = module.train_step(micro_batches(step, rows, module.world), step, 6)
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("recomputed", "cut"),
    [(a, b) for n, a in enumerate(RECOMPUTED) for m, b in enumerate(CUTS) if (n + m) % 3 != 1],
)
def test_each_token_with_a_label_counts_once_a_step(recomputed: str, cut: str) -> None:
    module = build(model=of_experts(), ac_config=RECOMPUTED[recomputed])
    for step in (1, 2):
        labels = stepped(module, CUTS[cut], step)["train/labels"]
        assert module.experts.counts.sum(1).tolist() == [labels * 2] * 2  # top_k, layers


@pytest.mark.parametrize("cut", CUTS)
def test_the_bias_moves_once_a_step_by_the_counts_of_all_micro_batches(cut: str) -> None:
    module = build(model=of_experts())
    assert not any(bias.any() for bias in biases(module))
    metrics = stepped(module, CUTS[cut])
    for bias, counts in zip(biases(module), module.experts.counts.double(), strict=True):
        sign = (counts.mean() - counts).sign()
        torch.testing.assert_close(bias.double(), 0.01 * (sign - sign.mean()), rtol=1e-6, atol=0)
    assert metrics["experts/bias norm"] == pytest.approx(float(torch.stack(biases(module)).norm()))


def test_evaluation_counts_nothing_and_moves_no_bias() -> None:
    module = build(model=of_experts())
    stepped(module, [ROWS])
    before = (module.experts.counts.clone(), digest(full(module)["model"]))
    module.eval_batch(micro_batches(2, [ROWS], module.world)[0])
    assert torch.equal(module.experts.counts, before[0])
    assert digest(full(module)["model"]) == before[1]


def test_a_step_says_what_share_of_the_choices_was_beyond_capacity() -> None:
    roomy, tight = (
        stepped(build(model=of_experts(capacity_factor=factor)), [3, 5]) for factor in (6.0, 0.5)
    )
    assert roomy["experts/dropped"] == 0
    assert 0.4 < tight["experts/dropped"] < 0.7
    assert tight["train/CE loss"] != roomy["train/CE loss"]
    plain = stepped(build(model=of_experts()), [3, 5])
    assert plain.keys() | {"experts/dropped"} == roomy.keys()
    assert plain["train/CE loss"] == roomy["train/CE loss"]


def test_what_is_dropped_is_the_same_each_time_and_when_it_is_computed_again() -> None:
    kept, *others = (
        two_steps(build(model=of_experts(capacity_factor=0.6), ac_config=ac), [3, 5])
        for ac in (RECOMPUTED["kept"], *RECOMPUTED.values())
    )
    assert kept.metrics["experts/dropped 2"] > 0.3
    for other in others:
        assert (other.losses, other.metrics) == (kept.losses, kept.metrics)
        assert all(torch.equal(g, other.gradients[name]) for name, g in kept.gradients.items())


def test_a_step_that_is_not_taken_moves_no_bias() -> None:
    module = build(model=of_experts())
    handle = module.model.norm.register_forward_hook(lambda _m, _args, out: out * float("nan"))
    assert stepped(module, [ROWS])["optim/non-finite"] == 1
    handle.remove()
    assert not any(bias.any() for bias in biases(module))


@pytest.mark.parametrize("balance", BALANCES)
def test_balance_by_bias_documents_or_steps_does_not_depend_on_the_cut(balance: str) -> None:
    runs = [two_steps(build(model=of_experts(**BALANCES[balance])), cut) for cut in CUTS.values()]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-6)
        assert run.metrics == pytest.approx(runs[0].metrics, rel=1e-5)
        for name, gradient in runs[0].gradients.items():
            assert (run.gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max()


def test_balance_by_micro_batches_is_weighted_by_their_labels() -> None:
    options: dict[str, Any] = {"name": "aux", "weight": 0.1}
    model = of_experts(balance=options, z_loss=0.0)
    found = stepped(build(model=model), CUTS["two"])
    module, total = build(model=model), 0.0
    for batch in micro_batches(1, CUTS["two"], module.world):
        labels = int((batch.labels != IGNORE_INDEX).sum())
        alone = build(model=model).train_step([batch], 1, 6)
        total += float(alone["train/aux balance loss"]) * labels
    assert found["train/aux balance loss"] == pytest.approx(total / found["train/labels"], rel=1e-5)
    whole = stepped(build(model=model), CUTS["whole"])["train/aux balance loss"]
    assert abs(whole / found["train/aux balance loss"] - 1) > 1e-4
    assert whole >= 0.1 * 0.99  # 1 times the weight where all experts are alike


def of_documents(module: TransformerTrainModule, batch: Batch) -> Tensor:
    """The sum of the balance of the documents of a batch, which may be differentiated."""
    routing = module.experts.routing(batch)
    _, routed = batch.through(module.model, lambda _, x: None, routing=routing)
    found: Tensor = routed.within.sum()
    return found


def test_packed_documents_do_not_influence_each_others_balance() -> None:
    module = build(model=of_experts(**BALANCES["sequence_aux"]))
    both, other = (make_batch([[20, 12]], vocab_size=97, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        other.input_ids[:, :20] = both.input_ids[:, :20]
    second = {*both.input_ids[0, 20:].tolist(), *other.input_ids[0, 20:].tolist()}
    only_first = sorted({*both.input_ids[0, :20].tolist()} - second)
    gradients = []
    for batch in (both, other):
        module.model.zero_grad()
        table = module.model.embeddings.weight
        (gradient,) = torch.autograd.grad(of_documents(module, batch), table)
        gradients.append(gradient[only_first])
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-9)
    alone = 0.0
    for start, stop in ((0, 20), (20, 32)):
        part = make_batch([[stop - start]], vocab_size=97)
        part.input_ids.copy_(both.input_ids[:, start:stop])
        part.labels.copy_(both.labels[:, start:stop])
        alone += of_documents(module, part).item()
    assert of_documents(module, both).item() == pytest.approx(alone, rel=1e-5)


def test_a_model_without_experts_has_no_metrics_of_them() -> None:
    metrics = stepped(build(), [ROWS])
    assert not [name for name in metrics if name.startswith("experts/") or "balance" in name]
    assert {"experts/load max over mean", "experts/load entropy", "experts/without tokens"} <= set(
        stepped(build(model=of_experts(balance=None)), [ROWS])
    )


def test_metrics_are_those_of_the_counts() -> None:
    module = build(model=of_experts())
    metrics = stepped(module, CUTS["two"])
    load = module.experts.counts.double()
    assert metrics["experts/load max over mean"] == pytest.approx(
        max(float(layer.max() / layer.mean()) for layer in load)
    )
    assert metrics["experts/without tokens"] == int((load == 0).sum())
    shares = (load / load.sum(1, keepdim=True)).clamp(min=1e-30)
    entropy = -(shares * shares.log()).sum(1).mean() / torch.tensor(6.0).log()
    assert metrics["experts/load entropy"] == pytest.approx(float(entropy), rel=1e-5)


def test_documents_are_numbered_by_the_offsets_of_a_batch() -> None:
    module = build(model=of_experts(**BALANCES["sequence_aux"]))
    batch = make_batch([[3, 5], [8]], vocab_size=97)
    counted, documents, most = module.experts.routing(batch)
    assert documents.tolist() == [0] * 3 + [1] * 5 + [2] * 8
    assert most == 3
    assert torch.equal(counted, (batch.labels != IGNORE_INDEX).flatten())


@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_who_looks_at_activations_changes_no_bit_and_no_count(recomputed: str) -> None:
    plain, looked = (build(model=of_experts(), ac_config=RECOMPUTED[recomputed]) for _ in range(2))
    probe = ActivationProbe(looked.model, gradients=True)
    probe.begin(torch.device("cpu"))
    for module in (plain, looked):
        stepped(module, CUTS["two"])
    rows, gradients = probe.end()
    assert digest(full(plain)["model"]) == digest(full(looked)["model"])
    assert torch.equal(plain.experts.counts, looked.experts.counts)
    for name in ("router", "experts", "shared.w_down"):
        place = probe.names.index(f"blocks.1.feed_forward.{name}")
        assert rows[place, 0] == gradients[place, 0] == ROWS
        assert rows[place, 3] > 0


def test_experts_in_float32_are_not_compiled() -> None:
    with pytest.raises(UsageError, match="not compiled in float32"):
        build(model=of_experts(), compile_model=True)
    old = Capability(device="cuda", name="T4", triton=True)
    config = TransformerTrainModuleConfig(rank_microbatch_size=32)
    assert resolve(of_experts(), config, old)[1].compile_model is False
    new = replace(old, modern=True)
    assert resolve(of_experts(), config, new)[1].compile_model is True
