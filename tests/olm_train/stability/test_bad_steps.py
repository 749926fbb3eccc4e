"""Bad steps: spikes are left out, and what is not finite is told with its documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import ROWS, STEPS, build, digest, full, micro_batches

from olm_data.mixture.lock import Lock
from olm_train.data.loader import DataLoader
from olm_train.distributed.world import World
from olm_train.optim.adamw import AdamWConfig, SkipStepAdamWConfig
from olm_train.optim.lion import LionConfig, SkipStepLionConfig
from olm_train.stability.gate import NonFinite, SkipStepOptions, StepGuard
from olm_train.stability.report import BadSteps, NonFiniteError, write_report

CPU = torch.device("cpu")
PAIRS = {
    "adamw": (AdamWConfig(lr=1e-2), SkipStepAdamWConfig(lr=1e-2, rolling_interval_length=8)),
    "lion": (LionConfig(lr=1e-3), SkipStepLionConfig(lr=1e-3, rolling_interval_length=8)),
}


class Options(SkipStepOptions):
    def __post_init__(self) -> None:
        pass  # no optimiser to check


@given(
    st.lists(st.tuples(st.floats(0, 8, width=32), st.floats(0, 8, width=32)), max_size=30),
    st.integers(4, 10),
    st.floats(0.5, 6),
)
def test_decisions_are_those_of_the_rule(
    values: list[tuple[float, float]], length: int, sigma: float
) -> None:
    guard = StepGuard(Options(rolling_interval_length=length, sigma_factor=sigma), CPU)
    for i, (loss, norm) in enumerate(values):
        taken = bool(guard.push(torch.tensor(loss), torch.tensor(norm)))
        past = np.array(values[max(0, i - length) : i], np.float64).reshape(-1, 2)
        if len(past) < 2 or len(past) + 1 < length // 2:  # as OLMo-core counts, the step with them
            assert taken
            continue
        excess = np.array([loss, norm]) - past.mean(0) - sigma * past.std(0, ddof=1)
        if np.abs(excess).min() > 1e-4:  # not a matter of rounding
            assert taken is bool((excess <= 0).all())
        assert bool(guard.skipped()) is not taken


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8, 9, 16, 128])
def test_t11_the_first_decision_falls_at_the_step_of_olmo_core(length: int) -> None:
    guard = StepGuard(Options(rolling_interval_length=length, sigma_factor=6.0), CPU)
    taken = []
    for step in range(1, length + 1):
        spike = 100.0 if step in (1, length) else 2.0 + 0.01 * (step % 3)
        probe = StepGuard(guard.options, CPU)
        for own, other in zip(probe.state().values(), guard.state().values(), strict=True):
            own.copy_(other)
        taken.append(bool(probe.push(torch.tensor(1e6), torch.tensor(1.0))))
        guard.push(torch.tensor(spike), torch.tensor(1.0))
    # Theirs decides once the values, the step's own among them, are max(2, length // 2); with two
    # of them theirs has the deviation of one value, which is no number, and leaves out the step.
    first = max(3, length // 2)
    assert taken == [step < first for step in range(1, length + 1)]


@pytest.mark.parametrize("name", PAIRS)
def test_without_a_spike_it_is_the_plain_optimiser_bit_for_bit(name: str) -> None:
    plain, guarded = (build(optim=config) for config in PAIRS[name])
    for module in (plain, guarded):
        for step in (1, 2):  # before the history says anything
            module.train_step(micro_batches(step, [ROWS], module.world), step, STEPS)
    assert digest(full(plain)["model"]) == digest(full(guarded)["model"])


@pytest.mark.parametrize("name", PAIRS)
def test_a_spike_changes_neither_weights_nor_state_and_the_next_step_goes_on(name: str) -> None:
    module = build(optim=PAIRS[name][1])
    skipped = []
    for step in range(1, STEPS + 1):
        batches = micro_batches(step, [ROWS], module.world)
        before = {part: digest(tensors) for part, tensors in state(module).items()}
        if step == 5:
            hook = module.model.norm.register_forward_hook(lambda _m, _a, out: out * 50)
        metrics = module.train_step(batches, step, STEPS)
        if step == 5:
            hook.remove()
            assert {part: digest(tensors) for part, tensors in state(module).items()} == before
        else:
            assert digest(full(module)["model"]) != before["model"]
        skipped.append(float(metrics["optim/step skipped"]))
    assert skipped == [0, 0, 0, 0, 1, 0]


def state(module) -> dict[str, dict[str, torch.Tensor]]:  # type: ignore[no-untyped-def]
    """The state but for the guard's history."""
    whole = full(module)
    return {p: {n: x for n, x in t.items() if "skip_step" not in n} for p, t in whole.items()}


def test_a_resumed_run_decides_as_an_undisturbed_one() -> None:
    config = SkipStepAdamWConfig(lr=1e-2, rolling_interval_length=8)
    first = build(optim=config)
    for step in range(1, 5):
        first.train_step(micro_batches(step, [ROWS], first.world), step, STEPS)
    second = build(optim=config)
    second.load_state_dict(full(first))
    for module in (first, second):
        hook = module.model.norm.register_forward_hook(lambda _m, _a, out: out * 50)
        metrics = module.train_step(micro_batches(5, [ROWS], module.world), 5, STEPS)
        hook.remove()
        assert float(metrics["optim/step skipped"]) == 1
    assert {p: digest(t) for p, t in full(first).items()} == {
        p: digest(t) for p, t in full(second).items()
    }


def test_the_report_names_each_document_of_each_row(tiny_mixture: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad-step00000003.json"
    said = write_report(path, 3, "nan", "inf", Lock.read(tiny_mixture), [16, 17])
    report = json.loads(path.read_text())
    assert list(report) == ["step", "loss", "grad_norm", "rows"]
    assert (report["step"], report["loss"], report["grad_norm"]) == (3, "nan", "inf")
    assert [row["row"] for row in report["rows"]] == [16, 17]
    names = ["id", "input", "position", "position_kind", "shard", "document", "start", "stop"]
    for row in report["rows"]:
        assert list(row) == ["row", "stage", "source", "documents"]
        assert all(list(document) == names for document in row["documents"])
        assert sum(d["stop"] - d["start"] for d in row["documents"]) >= 32
    assert said.startswith("documents: ")
    assert report["rows"][0]["documents"][0]["input"] in said


def test_a_damaged_dataset_does_not_hide_the_bad_step(tiny_mixture: Path, tmp_path: Path) -> None:
    lock = Lock.read(tiny_mixture)
    path = tmp_path / "bad-step00000003.json"
    write_report(path, 3, "nan", "1.0", lock, [10**9])
    report = json.loads(path.read_text())
    assert report["rows"] == []
    assert report["incomplete"]


def test_a_run_goes_back_as_often_as_allowed(tiny_mixture: Path, tmp_path: Path) -> None:
    said: list[str] = []
    loader = DataLoader(tiny_mixture, global_batch_size=256, rank_microbatch_size=64)
    bad = BadSteps(loader, tmp_path, World(), 1, said.append)
    error = NonFiniteError(3, ((16, 24),), "loss nan", tmp_path / "report.json")
    for policy, possible in ((NonFinite.halt, True), (NonFinite.rewind, False)):
        with pytest.raises(NonFiniteError):
            bad.count_rewind(error, policy, can_go_back=possible)
    bad.count_rewind(error, NonFinite.rewind, can_go_back=True)
    assert (bad.rewinds, bad.rows) == (1, ((16, 24),))
    assert said[-1] == "rewinding, and leaving out rows [[16, 24]]"
    with pytest.raises(NonFiniteError):
        bad.count_rewind(error, NonFinite.rewind, can_go_back=True)
