from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import build_trainer, metrics

from olm_data.errors import ResourceError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manager import CheckpointManager
from olm_train.checkpoint.merged import merge_of
from olm_train.distributed.world import World
from olm_train.extensions.averaging.callbacks import EMACallback
from olm_train.trainer import Trainer

STOP = "--trainer.hard_stop={value: 12, unit: steps}"
OFTEN = "--trainer.callbacks.checkpointer={save_interval: 50, ephemeral_save_interval: 1}"


class Killed(BaseException):
    """Stands for the end of the process."""


class Recorder(Callback):
    """Keeps the weights after each step; ends the run after one of them."""

    priority = 100

    def __init__(self, kill: int | None = None) -> None:
        self.kill, self.weights = kill, dict[int, dict[str, np.ndarray]]()

    def post_step(self) -> None:
        state = self.trainer.train_module.state_dict()["model"]
        self.weights[self.trainer.step] = {n: t.numpy().astype(float) for n, t in state.items()}
        if self.trainer.step == self.kill:
            raise Killed


def trainer_with(
    lock: Path, folder: Path, *given: str, recorder: Recorder | None = None, **options: Any
) -> Trainer:
    callbacks = {"ema": EMACallback(**options), "recorder": recorder or Recorder()}
    return build_trainer(lock, folder, STOP, *given, callbacks=callbacks)


def saved(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(folder, World())
    tensors = {n: torch.empty(e.shape) for n, e in checkpoint.index.tensors.items()}
    checkpoint.load_tensors(tensors, World())
    return {name.removeprefix("model."): tensor.numpy() for name, tensor in tensors.items()}


def assert_average(folder: Path, seen: list[dict[str, np.ndarray]], decay: float) -> None:
    for name, got in saved(folder).items():
        wanted = seen[0][name]
        for each in seen[1:]:
            wanted = decay * wanted + (1 - decay) * each[name]
        unit = np.spacing(np.max([np.abs(w[name]) for w in seen], 0).astype(np.float32))
        # each step rounds by a unit at most, and later ones shrink that by the decay
        assert (np.abs(got - wanted) <= unit / (1 - decay)).all(), name


def test_the_average_is_that_of_float64_at_intervals_and_at_the_end(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    recorder = Recorder()
    build_trainer(
        tiny_mixture,
        tmp_path,
        STOP,
        "--trainer.callbacks.ema={decay: 0.8, start_step: 2, save_interval: 5}",
        callbacks={"recorder": recorder},
    ).fit()
    assert [p.name[4:] for p in sorted(tmp_path.glob("*-ema"))] == [
        "00000005-ema",
        "00000010-ema",
        "00000012-ema",
    ]
    for end in (5, 10, 12):
        seen = [recorder.weights[step] for step in range(3, end + 1)]
        assert_average(tmp_path / f"step{end:08d}-ema", seen, 0.8)
    merge = merge_of(open_checkpoint(tmp_path / "step00000012-ema", World()))
    assert merge is not None
    assert (merge.weights, merge.decay, merge.first, merge.count) == ("ema", 0.8, 3, 10)
    evaluated = [x["step"] for x in metrics(tmp_path) if "merged/ema/held" in x.get("eval", {})]
    assert evaluated == [5, 10, 12]


@pytest.mark.slow
def test_killed_and_gone_on_with_the_average_has_the_same_bits_and_training_too(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"decay": 0.9, "output_suffix": "smooth"}
    trainer_with(tiny_mixture, tmp_path / "whole", OFTEN, **options).fit()
    with pytest.raises(Killed):
        trainer_with(
            tiny_mixture, tmp_path / "killed", OFTEN, recorder=Recorder(7), **options
        ).fit()
    trainer_with(tiny_mixture, tmp_path / "killed", OFTEN, **options).fit()
    one, other = (saved(tmp_path / run / "step00000012-smooth") for run in ("whole", "killed"))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    build_trainer(tiny_mixture, tmp_path / "without", STOP, OFTEN).fit()
    lines = [
        x for x in metrics(tmp_path / "killed") if "merged/smooth/held" not in x.get("eval", {})
    ]
    assert lines == metrics(tmp_path / "without")


def test_an_average_that_begins_late_or_anew_says_so(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        build_trainer(
            tiny_mixture, tmp_path, STOP, OFTEN, callbacks={"recorder": Recorder(6)}
        ).fit()
    trainer_with(tiny_mixture, tmp_path).fit()
    assert "note: the average of the weights begins with step 6" in capsys.readouterr().err


def test_an_average_that_could_not_be_written_is_not_promised_for_later(
    tiny_mixture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = CheckpointManager.save_merged

    def full(manager: CheckpointManager, weights: Any, merge: Any, suffix: str) -> str:
        if merge.last == 5:
            raise ResourceError("the disk is full")
        return whole(manager, weights, merge, suffix)

    monkeypatch.setattr(CheckpointManager, "save_merged", full)
    trainer_with(tiny_mixture, tmp_path, OFTEN, decay=0.8, save_interval=5).fit()
    assert "training goes on; no average of step 5 is saved" in capsys.readouterr().err
    assert [p.name for p in sorted(tmp_path.glob("*-ema"))] == [
        "step00000010-ema",
        "step00000012-ema",
    ]
