"""The estimate on problems whose noise is known, and what it sees of micro-batches and ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.probe_checks import Steps, train_and_look
from support.runs import metrics, one_step_trainer
from support.training import build, micro_batches

from olm_data.run_log.metric_names import LABELS, NOISE_SCALE, NOISE_SIGNAL, NOISE_VARIANCE
from olm_train.extensions.monitors.gradient_noise_scale import GradientNoiseScaleCallback, estimate
from olm_train.model.loss import count_valid


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.floats(0.01, 10), st.floats(0, 9))
def test_expected_norms_give_signal_and_variance_exactly(
    labels: list[int], signal: float, variance: float
) -> None:
    total = sum(labels)
    # E|share of i|^2 = (n_i / N)^2 (signal + variance / n_i)
    shares = [(n / total) ** 2 * (signal + variance / n) for n in labels]
    norms = sum(total / n * share for n, share in zip(labels, shares, strict=True))
    found = estimate(norms, signal + variance / total, total, len(labels))
    assert math.isclose(found[0], signal, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(found[1], variance, rel_tol=1e-9, abs_tol=1e-9)


def test_drawn_gradients_give_the_noise_scale_they_were_drawn_with() -> None:
    generator = torch.Generator().manual_seed(1)
    true, spread, sizes = torch.full((20,), 0.5), 2.0, [3, 8, 5, 16]
    signal = variance = 0.0
    for _ in range(2000):
        draws = [true + spread * torch.randn(n, 20, generator=generator) for n in sizes]
        shares = [each.sum(0) / sum(sizes) for each in draws]
        total = sum(sizes)
        norms = sum(total / n * float(g @ g) for n, g in zip(sizes, shares, strict=True))
        whole = torch.stack(shares).sum(0)
        found = estimate(norms, float(whole @ whole), total, len(sizes))
        signal, variance = signal + found[0], variance + found[1]
    assert math.isclose(variance / signal, 20 * spread**2 / float(true @ true), rel_tol=0.03)


def own_norms(rows: list[int]) -> tuple[float, float, float]:
    """Signal and variance of step 1, from a backward pass for each micro-batch; and labels."""
    module = build()
    batches = micro_batches(1, rows, module.world)
    counts = [int(count_valid(batch.labels)) for batch in batches]
    total, shares = sum(counts), []
    for batch in batches:
        module.model.zero_grad()
        sums = module._reduce(batch, lambda *a, b=batch: module._loss(*a, labels=b.labels))
        (sums.total / total).backward()
        gradients = [p.grad.flatten() for p in module.model.parameters()]
        shares.append(torch.cat(gradients).double())
    norms = sum(total / n * float(g @ g) for n, g in zip(counts, shares, strict=True) if n)
    whole = torch.stack(shares).sum(0)
    return *estimate(norms, float(whole @ whole), total, sum(n > 0 for n in counts)), total


@pytest.mark.parametrize("rows", [[4, 4], [1, 3, 4], [1] * 8])
def test_a_step_sees_the_gradient_of_each_of_its_micro_batches(rows: list[int]) -> None:
    (line,) = Steps(build(), [GradientNoiseScaleCallback()]).run(rows, steps=1)
    signal, variance, labels = own_norms(rows)
    assert math.isclose(line[NOISE_SIGNAL], signal, rel_tol=1e-4)
    assert math.isclose(line[NOISE_VARIANCE], variance, rel_tol=1e-4)
    assert math.isclose(line[NOISE_SCALE], variance / signal, rel_tol=1e-4)
    assert line[LABELS] == labels
    assert not any("micro-batch" in name for name in line)


@pytest.mark.xdist_group("parallel")
def test_ranks_are_more_micro_batches(tmp_path: Path) -> None:
    results = run_ranks(train_and_look, 2, str(tmp_path))
    (alone, *_) = Steps(build(), [GradientNoiseScaleCallback(smoothing=0.5)]).run([1, 3, 1, 3])
    for result in results:
        for strategy in ("fsdp", "ddp"):
            (line, *_), _ = result[strategy, "with"]
            for name in (NOISE_SIGNAL, NOISE_VARIANCE, NOISE_SCALE):
                assert math.isclose(line[name], alone[name], rel_tol=1e-4), (strategy, name)


def test_the_average_goes_on_after_a_resume() -> None:
    whole = GradientNoiseScaleCallback(smoothing=0.9)
    parts = [GradientNoiseScaleCallback(smoothing=0.9) for _ in range(2)]
    lines = Steps(build(), [whole]).run([4, 4], steps=4)

    def log(callback: GradientNoiseScaleCallback, numbers: range) -> list[dict[str, float]]:
        found = []
        for number in numbers:
            line: dict[str, Any] = {
                "optim/micro-batch norms": 0.1 + number,
                "optim/micro-batches": 2.0,
                LABELS: 10.0,
                "optim/total grad norm": 0.7,
            }
            callback.pre_log_metrics(number, line)
            found.append(line)
        return found

    fresh = GradientNoiseScaleCallback(smoothing=0.9)
    expected = log(fresh, range(6))
    found = log(parts[0], range(3))
    parts[1].load_state_dict(json.loads(json.dumps(parts[0].state_dict())))
    assert found + log(parts[1], range(3, 6)) == expected
    assert len({line[NOISE_VARIANCE] for line in expected}) == 6
    assert len({line[NOISE_VARIANCE] for line in lines}) == 4


def test_smoothing_and_interval_have_their_effect() -> None:
    lines = Steps(build(), [GradientNoiseScaleCallback(interval=2)]).run([4, 4], steps=4)
    assert [NOISE_VARIANCE in line for line in lines] == [False, True] * 2
    sharp = Steps(build(), [GradientNoiseScaleCallback(interval=2, smoothing=0)]).run([4, 4], 4)
    assert sharp[1][NOISE_VARIANCE] == pytest.approx(lines[1][NOISE_VARIANCE])
    assert sharp[3][NOISE_VARIANCE] != pytest.approx(lines[3][NOISE_VARIANCE])


def test_one_micro_batch_says_that_there_is_nothing_to_compare() -> None:
    run = Steps(build(), [GradientNoiseScaleCallback()])
    lines = run.run([8])
    assert ["nothing to compare" in said for said in run.said] == [True]
    assert not any(NOISE_VARIANCE in line for line in lines)


def test_a_run_logs_it(tiny_mixture: Path, tmp_path: Path) -> None:
    one_step_trainer(tiny_mixture, tmp_path, "--trainer.callbacks.gradient_noise_scale={}").fit()
    (line,) = metrics(tmp_path)
    assert line[NOISE_VARIANCE] > 0
