"""Throughput is that of training alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import build_trainer

from olm_data.errors import UsageError
from olm_train.callbacks.speed_monitor import SpeedMonitorCallback


def test_throughput_leaves_out_evaluations_checkpoints_and_the_first_step(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        "--trainer.callbacks.lm_evaluator.eval_interval=3",
        "--data_loader.prefetch=0",
        stop=7,
    )
    step, evaluate = trainer.train_module.train_step, trainer.train_module.eval_batch

    def timed_step(*arguments: object, **options: object) -> object:
        now[0] += 100.0 if trainer.step == 0 else 2.0
        return step(*arguments, **options)  # type: ignore[arg-type]

    def timed_evaluation(batch: object) -> object:
        now[0] += 10.0
        return evaluate(batch)  # type: ignore[arg-type]

    trainer.train_module.train_step = timed_step  # type: ignore[method-assign,assignment]
    trainer.train_module.eval_batch = timed_evaluation  # type: ignore[method-assign,assignment]
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    measured = {
        line["step"]: (line["throughput/seconds per step"], line["throughput/tokens per second"])
        for line in lines
        if "throughput/seconds per step" in line
    }
    assert measured == dict.fromkeys((2, 3, 4, 6, 7), (2.0, 128.0))
    waits = [
        line["throughput/data wait share"]
        for line in lines
        if line["step"] in measured and "eval" not in line
    ]
    assert all(0 <= share < 1 for share in waits)
    # A CPU has no peak in the table.
    assert not any("throughput/MFU" in line for line in lines)


PEAK = "device_peak_flops_per_second=1e12"


@pytest.mark.parametrize(
    ("options", "flops"),
    [
        (["num_flops_per_token=1e6", PEAK], 1e6),
        (["num_params=1000", PEAK], 6e3),
        ([PEAK], None),  # what the model says
        (["num_flops_per_token=1e6"], 0.0),  # a peak that is not known
    ],
)
def test_utilisation_follows_flops_and_peak_that_are_given(
    tiny_mixture: Path, tmp_path: Path, options: list[str], flops: float | None
) -> None:
    prefix = "--trainer.callbacks.speed_monitor"
    given = [f"{prefix}.{option}" for option in options]
    trainer = build_trainer(tiny_mixture, tmp_path, *given, quiet=True, stop=3)
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    measured = [line for line in lines if "throughput/seconds per step" in line]
    assert measured
    for line in measured:
        if flops == 0.0:
            assert "throughput/MFU" not in line
            continue
        per_token = line["throughput/MFU"] * 1e12 / line["throughput/tokens per second"]
        model = trainer.train_module.flops_per_token(0.0)
        if flops is None:
            assert model < per_token < 2 * model  # and the pairs of attention
        else:
            assert per_token == pytest.approx(flops)


def test_two_ways_to_say_the_flops_are_refused() -> None:
    with pytest.raises(UsageError, match="no effect beside num_flops_per_token"):
        SpeedMonitorCallback(num_params=1, num_flops_per_token=2.0)
