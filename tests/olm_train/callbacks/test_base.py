"""The state of a callback in a checkpoint is that of its step, however it is saved."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.runs import build_trainer

from olm_train.callbacks.base import Callback
from olm_train.checkpoint.manifest import Kind
from olm_train.distributed.preempt import Preempted


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
