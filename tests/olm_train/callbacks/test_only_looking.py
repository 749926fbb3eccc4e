"""Callbacks that only look: all of them together change no bit of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.eval_requests import make_task
from support.runs import build_trainer, same_bits, steps_of, tensors
from support.webhook import webhook

from olm_train.callbacks.config import CallbacksConfig

LOOKING = {
    "config_saver": "{save_data_paths: true}",
    "downstream_evaluator": "{tasks: {mine: TASK}, eval_interval: 1}",
    "ema": "{decay: 0.9}",
    "gap_monitor": "{interval: 1}",
    "gpu_memory_monitor": "{}",
    "gradient_noise_scale": "{}",
    "lm_evaluator": "{datasets: {held: HELD}, eval_interval: 2}",
    "loss_ledger": "{}",
    "lr_monitor": "{}",
    "metric_saver": "{save_interval: 2}",
    "model_merge": "{merge_interval: 3, merge_last_n_steps: 2}",
    "notifier": "{webhook_url: HOOK, notifications: all}",
    "profiler": "{skip_first: 0, wait: 0, warmup: 1, active: 1, repeat: 1, with_stack: false}",
    "replay_checker": "{}",
    "replica_checker": "{interval: 2}",
    "samples": "{prompts: ['def '], eval_interval: 2, max_new_tokens: 4}",
    "stability_monitor": "{}",
    "tensorboard": "{}",
}
OTHERS = {
    # they change what is trained on, or how long
    *("batch_size_scheduler", "sequence_length_scheduler", "early_stopping"),
    # they are in every run, or read its files from beside it
    *("checkpointer", "console_logger", "metrics_logger", "speed_monitor", "garbage_collector"),
    *("environment", "watchdog", "comet", "trackio", "wandb", "hf_exporter"),
}


def test_all_of_them_are_here() -> None:
    assert {*LOOKING} | OTHERS == {*CallbacksConfig.kinds()}


@pytest.mark.filterwarnings("ignore::UserWarning")  # the profiler's, of a machine without GPU
def test_losses_and_weights_have_the_same_bits_with_all_of_them_and_without(
    tiny_mixture: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_task(tmp_path / "task", tiny_tokenizer)
    held = str(tiny_mixture.parent / "held")
    with webhook() as hook:
        words = {"TASK": str(tmp_path / "task"), "HELD": held, "HOOK": hook.url}
        options = []
        for name, given in LOOKING.items():
            for word, value in words.items():
                given = given.replace(word, value)
            options.append(f"--trainer.callbacks.{name}={given}")
        build_trainer(tiny_mixture, tmp_path / "with", *options, stop=7).fit()
    off = [f"--trainer.callbacks.{name}.enabled=false" for name in ("lm_evaluator", "lr_monitor")]
    build_trainer(tiny_mixture, tmp_path / "without", *off, stop=7).fit()
    logs = [
        [line["train/CE loss"] for line in steps_of(tmp_path / name)]
        for name in ("with", "without")
    ]
    assert logs[0] == logs[1]
    with_all, without = (
        tensors(
            lambda: build_trainer(tiny_mixture, tmp_path / "x"), tmp_path / name / "step00000007"
        )
        for name in ("with", "without")
    )
    assert same_bits(with_all, without)
