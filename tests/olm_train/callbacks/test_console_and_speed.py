"""What a user reads while a run goes on, and the throughput in it."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest
from support.runs import build_trainer

from olm_train.callbacks.base import Callback

STOP = "--trainer.hard_stop={value: 7, unit: steps}"


def test_one_line_an_interval_and_at_both_ends(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(
        tiny_mixture, tmp_path, STOP, "--trainer.callbacks.console_logger.log_interval=3"
    ).fit()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "1/7", "3/7", "6/7", "7/7",
    ]  # fmt: skip
    assert re.fullmatch(
        r"step 6/7   loss \d\.\d{4}   lr \S+   grad norm \S+   \S+( K)? tok/s   wait \S+%   ETA .+",
        next(line for line in lines if line.startswith("step 6/7")),
    )
    assert lines[0].startswith("training 21.6 K parameters to step 7 (1.79 K tokens) on 1 CPU rank")
    assert lines[1].startswith(
        "attention sdpa; loss plain: logits of a micro-batch need 0.000393 GB"
    )
    assert lines[-1] == "finished at step 7 (1.79 K tokens)"


def test_throughput_leaves_out_evaluations_checkpoints_and_the_first_step(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        STOP,
        "--trainer.callbacks.lm_evaluator.eval_interval=3",
        "--data_loader.prefetch=0",
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


class Watch(Callback):
    """Notes whether automatic garbage collection was on in each step."""

    def __init__(self) -> None:
        self.enabled: list[bool] = []

    def post_step(self) -> None:
        self.enabled.append(gc.isenabled())


@pytest.mark.parametrize("managed", [True, False])
def test_garbage_is_collected_at_fixed_steps_only(
    tiny_mixture: Path, tmp_path: Path, managed: bool
) -> None:
    watch, collected = Watch(), []
    config = f"{{enabled: {str(managed).lower()}, gc_interval: 3}}"
    gc.callbacks.append(
        lambda phase, info: collected.append(info["generation"]) if phase == "start" else None
    )
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        STOP,
        f"--trainer.callbacks.garbage_collector={config}",
        callbacks={"watch": watch},
    )
    collected.clear()
    trainer.fit()
    gc.callbacks.pop()
    assert watch.enabled == [not managed] * 7
    if managed:
        # the youngest generation may have been collected before the first step
        assert [generation for generation in collected if generation][:2] == [1, 1]
    assert gc.isenabled()
