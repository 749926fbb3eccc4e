from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import build_trainer, one_step_trainer

from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback, unreached
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.callbacks.group import Callbacks


def test_a_second_callback_of_a_name_is_refused(tiny_mixture: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path)
    with pytest.raises(UsageError, match="there is a callback 'metrics_logger' already"):
        trainer.add_callback("metrics_logger", Callback())


def test_one_that_is_off_is_left_out_and_stands_for_the_default(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    off = {"mine": ConsoleLoggerCallback(enabled=False)}
    callbacks = Callbacks(off, build_trainer(tiny_mixture, tmp_path))
    assert "metrics_logger" in callbacks
    assert not any(isinstance(each, ConsoleLoggerCallback) for each in callbacks.values())


def test_those_of_higher_priority_run_first(tiny_mixture: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    class Late(Callback):
        priority = -3

        def post_attach(self) -> None:
            self.number = type(self).priority

        def pre_train(self) -> None:
            calls.append(self.number)

    class Early(Late):
        priority = 3

    trainer = build_trainer(tiny_mixture, tmp_path)
    trainer.add_callback("late", Late())
    trainer.add_callback("early", Early())
    try:
        trainer.callbacks.call("pre_train")
    finally:
        trainer.callbacks.call("close")
    assert calls == [3, -3]


class Failing(Callback):
    """Fails where a run ends."""

    priority = 5

    def on_error(self, error: BaseException) -> None:
        raise RuntimeError("on_error fails")

    def close(self) -> None:
        raise RuntimeError("close fails")


class Ending(Callback):
    """Notes how a run ends."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_error(self, error: BaseException) -> None:
        self.seen.append(str(error))

    def close(self) -> None:
        self.seen.append("close")


def test_a_callback_that_fails_at_the_end_keeps_no_other_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ending = Ending()
    run = SimpleNamespace(say=lambda line: print(line))
    group = Callbacks({"failing": Failing(), "ending": ending}, run)  # type: ignore[arg-type]
    group.after(ValueError("the error"))
    assert "on_error of Failing failed: RuntimeError('on_error fails')" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="close fails"):
        group.close(lambda: ending.seen.append("last"))
    assert ending.seen == ["the error", "close", "last"]


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(UsageError, match="the callback 'mine' is a int"):
        Callbacks({"mine": 3}, SimpleNamespace())  # type: ignore


@pytest.mark.parametrize("given", [None, [], "ab", 3])
def test_what_is_no_list_of_the_steps_micro_batches_is_refused(
    given: Any, tiny_mixture: Path, tmp_path: Path
) -> None:
    class Wrong(Callback):
        def change_batches(self, batches: Any) -> Any:
            return given

    trainer = build_trainer(tiny_mixture, tmp_path, callbacks={"wrong": Wrong()})
    with pytest.raises(UsageError, match=r"change_batches\(\) of Wrong returned a"):
        trainer.fit()


@pytest.mark.parametrize("priority", ["high", None, True])
def test_a_priority_that_is_no_number_is_refused(
    priority: Any, tiny_mixture: Path, tmp_path: Path
) -> None:
    callback = Callback()
    callback.priority = priority  # type: ignore[misc]
    with pytest.raises(UsageError, match="priority of the callback 'mine'"):
        build_trainer(tiny_mixture, tmp_path).add_callback("mine", callback)


def test_what_options_ask_for_after_the_end_of_the_run_is_said(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {
        "lm_evaluator.fixed_steps": "[1, 400]",
        "checkpointer.fixed_steps": "[500]",
        "ema.start_step": "600",
        "profiler.skip_first": "700",
        "metric_saver.fixed_steps": "[800, 801, 802, 803]",
        "model_merge.merge_step": "[1, 900]",
    }
    given = [f"--trainer.callbacks.{option}={value}" for option, value in late.items()]
    one_step_trainer(tiny_mixture, tmp_path, *given[1:]).fit()
    said = capsys.readouterr().err
    for option, step in (
        ("checkpointer.fixed_steps", "500"),
        ("ema.start_step", "601"),
        ("profiler.skip_first", "701"),
        ("metric_saver.fixed_steps", "800, 801, 802, ..."),
        ("model_merge.merge_step", "900"),
    ):
        assert (
            f"note: trainer.callbacks.{option}: the run ends at step 1, before step {step}" in said
        )
    trainer = build_trainer(tiny_mixture, tmp_path / "evaluated", given[0], stop=1)
    assert unreached(trainer) == [
        "trainer.callbacks.lm_evaluator.fixed_steps: the run ends at step 1, before step 400"
    ]
