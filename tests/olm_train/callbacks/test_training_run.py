"""A run ended early by name, and metrics, epochs and checkpoints that callbacks have a hand in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.runs import build_trainer as build_whole
from support.runs import group_world, steps_of

from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.preempt import Preempted
from olm_train.distributed.world import World
from olm_train.metrics import MetricsBuffer, Reduce

STEPS = 8


build_trainer = partial(build_whole, stop=STEPS, quiet=True)


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
    trainer = build_trainer(tiny_mixture, tmp_path, callbacks={"cancel": cancel})
    trainer.fit()
    assert trainer.step == 5
    assert str(trainer.cancelled) == "my_rule (loss is low enough)"
    assert "cancelled at step 5 by my_rule (loss is low enough)" in capsys.readouterr().err
    assert open_checkpoint(tmp_path / "step00000005", World()).step == 5
    build_trainer(tiny_mixture, tmp_path).fit()
    assert [line["step"] for line in steps_of(tmp_path)] == [*range(1, STEPS + 1)]


def test_a_cancelled_run_may_be_left_to_whoever_starts_it_again(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    cancel = At(5, lambda trainer: trainer.cancel_run("maintenance"))
    option = "--trainer.on_cancel=requeue"
    with pytest.raises(Preempted) as stop:
        build_trainer(tiny_mixture, tmp_path, option, callbacks={"cancel": cancel}).fit()
    assert (stop.value.step, stop.value.exit_code) == (5, 75)
    assert str(stop.value) == "cancel_run (maintenance) at step 5"


def cancelled_by_rank_one(lock: Path, folder: Path) -> tuple[int, str, int]:
    def cancel(trainer: Any) -> None:
        if trainer.world.rank == 1:
            trainer.cancel_run("seen here alone", by="rank one")

    trainer = build_trainer(lock, folder, callbacks={"c": At(3, cancel)}, world=group_world())
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
    trainer = build_trainer(tiny_mixture, tmp_path, callbacks={"touch": touch})
    trainer.fit()
    assert trainer.step == 4
    assert trainer.cancelled is not None
    assert trainer.cancelled.by == "stop file"
    assert "\x1b" not in trainer.cancelled.why
    assert not (tmp_path / "stop").exists()
    build_trainer(tiny_mixture, tmp_path).fit()
    assert len(steps_of(tmp_path)) == STEPS


def test_a_stop_file_that_waits_for_the_next_start_ends_that(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    tmp_path.joinpath("stop").touch()
    trainer = build_trainer(tiny_mixture, tmp_path)
    trainer.fit()
    assert trainer.step == 0
    assert trainer.cancelled is not None


def test_a_recorded_metric_is_logged_once_with_its_step(tiny_mixture: Path, tmp_path: Path) -> None:
    logged_at = {("pre_step", 2): 3, ("post_step", 5): 5, ("evaluate", 4): 5, ("evaluate", 5): 5}
    records: dict[str, Callback] = {
        f"{hook} {at}": At(at, methodcaller("record_metric", f"{hook} {at}", 0.5), hook)
        for hook, at in logged_at
    }
    build_trainer(tiny_mixture, tmp_path, callbacks=records).fit()
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

    build_trainer(tiny_mixture, tmp_path, callbacks={"late": Late()}).fit()
    assert "recorded after the last step, not logged: too late" in capsys.readouterr().err


def reduced_over_two_ranks() -> Mapping[str, float]:
    world = group_world()
    buffer = MetricsBuffer(world)
    for kind in Reduce:
        buffer.record_one(1, kind.value, float(world.rank + 1), kind)
    if world.rank == 1:
        buffer.record_one(1, "here alone", 7.0, Reduce.mean)
    ((step, values),) = buffer.collect(1)
    assert step == 1
    assert buffer.collect(9) == []
    return values


def test_metrics_are_reduced_over_the_ranks_that_have_them() -> None:
    one, two = run_ranks(reduced_over_two_ranks, 2)
    assert one == two == {"mean": 1.5, "sum": 3.0, "max": 2.0, "min": 1.0, "here alone": 7.0}


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
    build_trainer(tiny_mixture, tmp_path, *given, callbacks=callbacks).fit()
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

    trainer = build_trainer(tiny_mixture, tmp_path, stop=1)
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
        build_trainer(tiny_mixture, first, stop=6).fit()
    options = ["--trainer.hard_stop={value: 7, unit: steps}"]
    folder = first
    if how == "load_path":
        folder = tmp_path / "second"
        options += [f"--trainer.load_path={first}", "--trainer.load_trainer_state=false"]
    build_trainer(tiny_mixture, folder, *options, callbacks={"told": Told()}).fit()
    assert loaded == ([] if how == "nothing" else [str(first / "step00000006")])
