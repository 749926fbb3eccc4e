"""A run with trackers: the same bits, the same run after a resume, each step in each sink once."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import REPOSITORY, STEPS, build_trainer, one_step_trainer
from support.tracked import Sink, logged, of_comet, of_tensorboard, of_trackio, of_wandb, same

from olm_data.extras import MissingExtra
from olm_train.extensions.tracking.comet import CometCallback
from olm_train.extensions.tracking.tensorboard import TensorBoardCallback
from olm_train.extensions.tracking.trackio import TrackioCallback
from olm_train.extensions.tracking.wandb import WandBCallback

KILLS = 6


@pytest.mark.slow
def test_a_run_killed_at_random_steps_has_each_step_in_each_sink_once(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    run, moments = tmp_path / "run", random.Random(3)
    trackers = {"tensorboard": of_tensorboard, "wandb": of_wandb, "comet": of_comet}
    readers: dict[str, Callable[[Path], Sink]] = {
        **trackers,
        "trackio": lambda run: of_trackio(tmp_path / "trackio"),
    }
    offline = {"WANDB_MODE": "offline", "COMET_START_ONLINE": "0"}
    offline |= {"TRACKIO_DIR": str(tmp_path / "trackio")}
    paths = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **offline}
    program = str(REPOSITORY / "tests/support/tracked_run.py")
    for kill in range(KILLS + 1):
        saved = [int(path.name[4:]) for path in run.glob("step????????")]
        step = min(STEPS - 1, max(saved, default=0) + moments.randint(1, 8))
        at = "0" if kill == KILLS else str(step)
        command = [sys.executable, program, str(tiny_mixture), str(run), at, *readers]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == (0 if kill == KILLS else -9), done.stderr
    for name, read in readers.items():
        assert same(read(run), logged(run), digits=5), name


def test_the_key_is_in_the_checkpoint_too(tiny_mixture: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stop = "--trainer.hard_stop={value: 6, unit: steps}"
    on = "--trainer.callbacks.tensorboard={}"
    build_trainer(tiny_mixture, run, on, stop).fit()
    callback = TensorBoardCallback()
    callback.load_state_dict({"key": "there"})
    assert callback._key == "there"
    said = json.loads((run / "tracking.json").read_text())
    assert said["trackers"]["tensorboard"]["key"] == "tensorboard"


@pytest.mark.parametrize(
    ("callback", "extra"),
    [
        (WandBCallback, "wandb"),
        (CometCallback, "comet"),
        (TrackioCallback, "trackio"),
        (TensorBoardCallback, "track"),
    ],
)
def test_a_client_that_is_missing_is_named_before_the_run(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callback: type, extra: str
) -> None:
    monkeypatch.setattr("olm_train.extensions.tracking.callback.find_spec", lambda name: None)
    trainer = one_step_trainer(tiny_mixture, tmp_path)
    with pytest.raises(MissingExtra) as refused:
        trainer.callbacks.add("tracker", callback())
    assert refused.value.fix == f"pip install 'olm-data[{extra}]'"


def test_options_reach_the_tracker_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_API_KEY", "abcdefgh12345678")
    run = TensorBoardCallback().tracked_run(tmp_path / "first", {"a": ["abcdefgh12345678"]})
    assert (run.name, run.project, run.config) == ("first", "olm", {"a": ["***"]})
    own = WandBCallback(name="n", project="p", config={"lr": 0.1, "note": "abcdefgh12345678"})
    run = own.tracked_run(tmp_path, {"a": 1})
    assert (run.name, run.project, run.config) == ("n", "p", {"lr": 0.1, "note": "***"})


def test_tags_are_asked_for_at_the_interval_and_not_without_tags() -> None:
    assert WandBCallback(cancel_check_interval=7).check_interval() == 7
    assert WandBCallback(cancel_tags=()).check_interval() is None
    assert TensorBoardCallback().check_interval() is None


def test_a_run_that_was_killed_after_its_last_save_still_brings_its_last_steps(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = "--trainer.callbacks.tensorboard={}"
    stop = "--trainer.hard_stop={value: 3, unit: steps}"
    build_trainer(tiny_mixture, tmp_path, stop, on).fit()
    shutil.rmtree(tmp_path / "tensorboard")
    (tmp_path / "tracking.json").unlink()
    capsys.readouterr()
    for message in ("still to do: the last steps in tensorboard", "nothing to do"):
        build_trainer(tiny_mixture, tmp_path, stop, on).fit()
        assert f"already finished at step 3: {message}\n" in capsys.readouterr().err
        assert same(of_tensorboard(tmp_path), logged(tmp_path), digits=5)
