"""What callbacks have a hand in: hooks in their order, states, metrics, the end of a run."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, one_step_trainer, steps_of

from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback, unreached
from olm_train.callbacks.config import CallbacksConfig
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.callbacks.group import Callbacks
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import Kind
from olm_train.distributed.preempt import Preempted
from olm_train.distributed.world import World
from olm_train.extensions.notices.notifier import NotifierCallback
from olm_train.metrics import Reduce


class Seen(Callback):
    """Notes each step in a list that it goes on with, at some priority."""

    def __init__(self, priority: int = 0, *, asks: int | None = None) -> None:
        self.priority = priority  # type: ignore[misc]
        self.asks = asks
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = list(state["steps"])

    def post_step(self) -> None:
        self.steps.append(self.trainer.step)
        if self.trainer.step == self.asks:
            self.trainer.save_checkpoint(Kind.permanent)

    def post_train(self) -> None:
        self.steps.append(-1)


class Stopper(Callback):
    """Sends the signal that a scheduler sends."""

    def post_step(self) -> None:
        if self.trainer.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def saved(folder: Path) -> dict[int, dict[str, list[int]]]:
    found = {}
    for path in folder.glob("step*/train.json"):
        state = json.loads(path.read_text())
        found[state["step"]] = {
            name: value["steps"] for name, value in state["callbacks"].items() if "steps" in value
        }
    return found


PRIORITIES = {"first": 9, "usual": 0, "last": -9}


@pytest.mark.parametrize("background", ["false", "true"])
def test_state_is_of_the_step_at_intervals_on_request_and_at_the_end(
    background: str, tiny_mixture: Path, tmp_path: Path
) -> None:
    asks = {"first": 3}
    build_trainer(
        tiny_mixture,
        tmp_path,
        f"--trainer.callbacks.checkpointer={{save_interval: 2, save_async: {background}}}",
        stop=5,
        callbacks={n: Seen(p, asks=asks.get(n)) for n, p in PRIORITIES.items()},
    ).fit()
    assert saved(tmp_path) == {
        step: {name: list(range(1, step + 1)) for name in PRIORITIES} for step in (2, 3, 4, 5)
    }


def test_state_goes_on_without_a_step_twice_or_left_out(tiny_mixture: Path, tmp_path: Path) -> None:
    for stop in (3, 6):
        callbacks = {name: Seen(priority) for name, priority in PRIORITIES.items()}
        build_trainer(tiny_mixture, tmp_path, stop=stop, callbacks=callbacks).fit()
    assert [seen.steps for seen in callbacks.values()] == [[1, 2, 3, 4, 5, 6, -1]] * 3


def test_state_is_of_the_step_where_a_signal_stops_the_run(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        callbacks={"stopper": Stopper(), **{n: Seen(p) for n, p in PRIORITIES.items()}},
    )
    with pytest.raises(Preempted):
        trainer.fit()
    assert saved(tmp_path) == {3: {name: [1, 2, 3] for name in PRIORITIES}}


class Broken(Seen):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state today")


def test_a_callback_that_cannot_say_its_state_ends_the_run_at_its_first_step(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, callbacks={"broken": Broken()})
    with pytest.raises(RuntimeError, match="no state today"):
        trainer.fit()
    assert trainer.step == 1


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


def test_each_run_gets_callbacks_of_its_own() -> None:
    config = CallbacksConfig(own={"notifier": NotifierCallback()})
    first, second = config.build(), config.build()
    assert first["notifier"] == second["notifier"]
    assert all(first[name] is not second[name] for name in first)


STEPS = 8
build = partial(build_trainer, stop=STEPS, quiet=True)


class At(Callback):
    """Calls a function in a hook, at one step."""

    def __init__(self, step: int, act: Callable[[Any], None], hook: str = "post_step") -> None:
        self.step, self.act, self.hook = step, act, hook

    def _maybe(self, hook: str) -> None:
        if hook == self.hook and self.trainer.step == self.step:
            self.act(self.trainer)

    def pre_step(self, batches: object) -> None:
        self._maybe("pre_step")

    def post_step(self) -> None:
        self._maybe("post_step")

    def evaluate(self) -> None:
        self._maybe("evaluate")


def test_a_cancelled_run_saves_and_ends_well_and_the_same_command_goes_on(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cancel = At(5, lambda trainer: trainer.cancel_run("loss is low enough", by="my_rule"))
    trainer = build(tiny_mixture, tmp_path, callbacks={"cancel": cancel})
    trainer.fit()
    assert trainer.step == 5
    assert str(trainer.cancelled) == "my_rule (loss is low enough)"
    assert "cancelled at step 5 by my_rule (loss is low enough)" in capsys.readouterr().err
    assert open_checkpoint(tmp_path / "step00000005", World()).step == 5
    build(tiny_mixture, tmp_path).fit()
    assert [line["step"] for line in steps_of(tmp_path)] == [*range(1, STEPS + 1)]


def test_a_cancelled_run_may_be_left_to_whoever_starts_it_again(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    cancel = At(5, lambda trainer: trainer.cancel_run("maintenance"))
    option = "--trainer.on_cancel=requeue"
    with pytest.raises(Preempted) as stop:
        build(tiny_mixture, tmp_path, option, callbacks={"cancel": cancel}).fit()
    assert (stop.value.step, stop.value.exit_code) == (5, 75)
    assert str(stop.value) == "cancel_run (maintenance) at step 5"


def cancelled_by_rank_one(lock: Path, folder: Path) -> tuple[int, str, int]:
    def cancel(trainer: Any) -> None:
        if trainer.world.rank == 1:
            trainer.cancel_run("seen here alone", by="rank one")

    trainer = build(lock, folder, callbacks={"c": At(3, cancel)}, world=group_world())
    trainer.fit()
    assert trainer.cancelled is not None
    return trainer.step, str(trainer.cancelled), trainer.cancelled.rank


def test_what_one_rank_asks_for_all_ranks_do_and_know(tiny_mixture: Path, tmp_path: Path) -> None:
    answers = run_ranks(cancelled_by_rank_one, 2, tiny_mixture, tmp_path)
    assert answers == [(3, "rank one (seen here alone)", 1)] * 2


@pytest.mark.parametrize("text", ["", "the disk is\x1b[2J full\n"])
def test_a_stop_file_ends_the_run_and_is_gone_then(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("olm_train.distributed.stop_file.POLL_SECONDS", 0.0)
    touch = At(4, lambda trainer: (tmp_path / "stop").write_text(text) and None)
    trainer = build(tiny_mixture, tmp_path, callbacks={"touch": touch})
    trainer.fit()
    assert trainer.step == 4
    assert trainer.cancelled is not None
    assert trainer.cancelled.by == "stop file"
    assert "\x1b" not in trainer.cancelled.why
    assert not (tmp_path / "stop").exists()
    build(tiny_mixture, tmp_path).fit()
    assert len(steps_of(tmp_path)) == STEPS


def test_a_stop_file_that_waits_for_the_next_start_ends_that(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    tmp_path.joinpath("stop").touch()
    trainer = build(tiny_mixture, tmp_path)
    trainer.fit()
    assert trainer.step == 0
    assert trainer.cancelled is not None


def test_a_recorded_metric_is_logged_once_with_its_step(tiny_mixture: Path, tmp_path: Path) -> None:
    logged_at = {("pre_step", 2): 3, ("post_step", 5): 5, ("evaluate", 4): 5, ("evaluate", 5): 5}
    records: dict[str, Callback] = {
        f"{hook} {at}": At(at, methodcaller("record_metric", f"{hook} {at}", 0.5), hook)
        for hook, at in logged_at
    }
    build(tiny_mixture, tmp_path, callbacks=records).fit()
    lines = steps_of(tmp_path)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    for (hook, at), step in logged_at.items():
        name = f"{hook} {at}"
        assert {line["step"]: line[name] for line in lines if name in line} == {step: 0.5}


def test_what_is_recorded_after_the_last_step_is_named(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Late(Callback):
        def post_train(self) -> None:
            self.trainer.record_metric("too late", 1.0)

    build(tiny_mixture, tmp_path, callbacks={"late": Late()}).fit()
    assert "recorded after the last step, not logged: too late" in capsys.readouterr().err


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.booleans())
def test_reductions_keep_nan_and_lie_in_range(values: list[float], nan: bool) -> None:
    if nan:
        assert all(math.isnan(kind.of([*values, math.nan])) for kind in Reduce)
        return
    assert Reduce.min.of(values) == min(values)
    assert Reduce.max.of(values) == max(values)
    assert Reduce.mean.of(values) == math.fsum(values) / len(values)
    assert Reduce.sum.of(values) == math.fsum(values)


def test_blocked_ephemeral_checkpoints_are_not_saved_until_nobody_blocks_them(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    seen: list[int] = []

    class Blocker(Callback):
        def post_step(self) -> None:
            if self.trainer.step == 3:
                self.block_ephemeral_checkpoints()
            if self.trainer.step == 8:
                self.unblock_ephemeral_checkpoints()

        def post_checkpoint_saved(self, folder: str) -> None:
            seen.append(int(folder[-8:]))

    options = ("save_interval=100", "ephemeral_save_interval=2", "save_async=false")
    given = [f"--trainer.callbacks.checkpointer.{option}" for option in options]
    given.append("--trainer.hard_stop={value: 12, unit: steps}")
    callbacks = {"one": Blocker(), "two": Blocker()}
    build(tiny_mixture, tmp_path, *given, callbacks=callbacks).fit()
    assert {*seen} - {0} == {2, 10, 12}


HOOKS = [
    "post_attach", "pre_train", "pre_load_batch", "pre_epoch", "pre_step", "pre_optim_step",
    "post_step", "post_epoch", "post_train", "close",
]  # fmt: skip


def test_a_lock_is_one_epoch_and_hooks_run_in_the_order_of_the_page(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    calls: list[str] = []

    class Recorder(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name in HOOKS:
                return lambda *given: calls.append(name)
            return super().__getattribute__(name)

    trainer = build(tiny_mixture, tmp_path, stop=1)
    trainer.add_callback("recorder", Recorder())
    trainer.fit()
    assert calls == HOOKS
    with pytest.raises(UsageError, match="comes too late"):
        trainer.add_callback("another", Recorder())


@pytest.mark.parametrize("how", ["nothing", "resume", "load_path"])
def test_callbacks_are_told_which_checkpoint_was_loaded(
    tiny_mixture: Path, tmp_path: Path, how: str
) -> None:
    loaded: list[str] = []

    class Told(Callback):
        def post_checkpoint_loaded(self, folder: str) -> None:
            loaded.append(folder)
            assert self.trainer.step == (6 if how == "resume" else 0)

    first = tmp_path / "first"
    if how != "nothing":
        build(tiny_mixture, first, stop=6).fit()
    options = ["--trainer.hard_stop={value: 7, unit: steps}"]
    folder = first
    if how == "load_path":
        folder = tmp_path / "second"
        options += [f"--trainer.load_path={first}", "--trainer.load_trainer_state=false"]
    build(tiny_mixture, folder, *options, callbacks={"told": Told()}).fit()
    assert loaded == ([] if how == "nothing" else [str(first / "step00000006")])
