"""T6: a resume says field by field what has changed, and the log of starts keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import build_trainer

from olm_data.run_log.log import read_starts


def stop_at(step: int) -> str:
    return f"--trainer.hard_stop={{value: {step}, unit: steps}}"


def changed_lines(text: str) -> list[str]:
    prefix = "  changed: "
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def test_t6_each_changed_field_has_its_line_and_the_log_has_the_configuration(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = build_trainer(tiny_mixture, tmp_path, stop_at(2))
    first.fit()
    assert changed_lines(capsys.readouterr().err) == []
    second = build_trainer(
        tiny_mixture,
        tmp_path,
        stop_at(4),
        "--train_module.optim.lr=2e-3",
        "--train_module.optim.weight_decay=0.0",
        "--train_module.scheduler.warmup=3",
        "--train_module.loss.z_loss_multiplier=1e-4",
        "--train_module.max_grad_norm=null",
    )
    second.fit()
    expected = {
        "train_module.optim.lr: 0.01 -> 0.002",
        "train_module.optim.weight_decay: 0.1 -> 0.0",
        "train_module.scheduler.warmup: 4 -> 3",
        "train_module.loss.z_loss_multiplier: None -> 0.0001",
        "train_module.max_grad_norm: 1.0 -> None",
        "trainer.hard_stop.value: 2 -> 4",
    }
    assert set(changed_lines(capsys.readouterr().err)) == expected
    one, two = read_starts(tmp_path)
    assert (one.config, two.config) == (first.config, second.config)
    assert (set(one.changes), set(two.changes)) == (set(), expected)
    build_trainer(tiny_mixture, tmp_path, stop_at(4), "--train_module.optim.lr=1.0").fit()
    assert changed_lines(capsys.readouterr().err) == []  # nothing goes on from there


def test_t6_state_of_a_callback_that_is_gone_is_named(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, tmp_path, stop_at(1)).fit()
    without = "--trainer.callbacks.lm_evaluator=null"
    build_trainer(tiny_mixture, tmp_path, stop_at(2), without).fit()
    said = capsys.readouterr().err
    assert "note: no callback lm_evaluator here takes the state it has there" in said
    assert any(line.startswith("trainer.callbacks.lm_evaluator: ") for line in changed_lines(said))


def test_t6_a_fallback_names_the_checkpoint_it_passes_over(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interval = "--trainer.callbacks.checkpointer.save_interval=1"
    build_trainer(tiny_mixture, tmp_path, stop_at(2), interval).fit()
    (tmp_path / "step00000002" / "manifest.json").write_text("{}")
    build_trainer(tiny_mixture, tmp_path, stop_at(3), interval).fit()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "manifest" in line]
    assert line.startswith("warning: ")
    assert "step00000002" in line
