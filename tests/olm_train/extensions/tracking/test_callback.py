"""A run with trackers: the same bits, each step in each sink once; also one that is over."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.forked import forked
from support.full_disk import files_of_at_most
from support.polling import wait_until
from support.runs import REPOSITORY, STEPS, build_trainer, metrics, one_step_trainer
from support.tracked import (
    Sink,
    evaluated,
    logged,
    of_comet,
    of_tensorboard,
    of_trackio,
    of_wandb,
    records_of_wandb,
    same,
    write_log,
)

from olm_data.errors import UsageError
from olm_data.extras import MissingExtra
from olm_data.run_log.log import Start, append_start, keep_until
from olm_train.extensions.tracking.base import TrackedRun
from olm_train.extensions.tracking.comet import CometCallback
from olm_train.extensions.tracking.command import configured, main, named
from olm_train.extensions.tracking.feeder import Feeder, TrackerState, write_tracked
from olm_train.extensions.tracking.tensorboard import TensorBoardCallback, TensorBoardTracker
from olm_train.extensions.tracking.trackio import TrackioCallback
from olm_train.extensions.tracking.wandb import WandBCallback

KILLS = 3


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
    for kill in range(KILLS + 1):
        saved = [int(path.name[4:]) for path in run.glob("step????????")]
        step = min(STEPS - 1, max(saved, default=0) + moments.randint(1, 8))
        at = "0" if kill == KILLS else str(step)
        words = ("support.tracked_run", tiny_mixture, run, at, *readers)
        done = forked(*words, environment=env, timeout=900)
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


ON = "--trainer.callbacks.tensorboard={}"


def test_a_resumed_run_has_each_step_once(tiny_mixture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with"
    trainer = build_trainer(
        tiny_mixture, folder, ON, "--trainer.hard_stop={value: 14, unit: steps}"
    )
    trainer.fit()
    for step in (13, 14):  # as if killed after step 12 was saved
        assert any(line["step"] == step for line in metrics(folder))
    shutil.rmtree(folder / "step00000014")
    build_trainer(tiny_mixture, folder, ON, "--trainer.hard_stop={value: 15, unit: steps}").fit()
    assert len(of_tensorboard(folder)) == 15
    same(of_tensorboard(folder), logged(folder), digits=5)


def test_name_project_and_configuration_are_shown(tiny_mixture: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = TensorBoardCallback(name="first try", project="lab")
    stop = "--trainer.hard_stop={value: 1, unit: steps}"
    trainer = build_trainer(tiny_mixture, tmp_path, stop)
    trainer.callbacks.add("tensorboard", callback)
    trainer.fit()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (shown,) = events.Tensors("config/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    assert text.startswith("# lab: first try")
    assert '"global_batch_size": 256' in text


def test_without_the_log_it_has_nothing_to_show(tiny_mixture: Path, tmp_path: Path) -> None:
    off = "--trainer.callbacks.metrics_logger.enabled=false"
    with pytest.raises(UsageError, match="metrics_logger is off"):
        build_trainer(tiny_mixture, tmp_path, ON, off).fit()


class Counted(TensorBoardTracker):
    """Counts how often it was opened."""

    opened = 0

    def open(self, key: str | None, logged: int) -> str:
        self.opened += 1
        return super().open(key, logged)


def told(folder: Path) -> TrackedRun:
    return TrackedRun(folder=folder, name="n", project="p", config={})


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_is_said_once_and_nothing_is_missing_or_twice_when_there_is_room_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], room: int
) -> None:
    write_log(tmp_path, range(1, 9))
    said: list[str] = []
    tracker = Counted(told(tmp_path))
    feeder = Feeder(tracker, tmp_path, step=0, say=said.append)
    feeder.start()
    wait_until(lambda: feeder.tracked is not None and feeder.tracked.step >= 7, "steps")
    (file,) = (tmp_path / "tensorboard").iterdir()
    write_log(tmp_path, range(9, 20))
    with files_of_at_most(file.stat().st_size + room if room else 0):
        feeder.wake()
        wait_until(lambda: tracker.opened > 2 if not room else len(said) > 0, "it fails")
    feeder.close("finished")
    assert len(said) == 1
    assert "tensorboard: OSError" in said[0]
    assert capfd.readouterr().err == ""
    same(of_tensorboard(tmp_path), logged(tmp_path), digits=5)


def test_a_start_on_a_machine_whose_clock_is_behind_is_read_after_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path, range(1, 9))
    Feeder(TensorBoardTracker(told(tmp_path)), tmp_path, step=0, say=pytest.fail).replay()
    keep_until(tmp_path, 5)
    write_log(tmp_path, range(6, 12))
    behind = time.time() - 3600
    monkeypatch.setattr("time.time", lambda: behind)
    Feeder(TensorBoardTracker(told(tmp_path)), tmp_path, step=5, say=pytest.fail).replay()
    same(of_tensorboard(tmp_path), logged(tmp_path), digits=5)


def test_an_evaluation_made_beside_the_run_is_shown_once_where_the_run_goes_back(
    tmp_path: Path,
) -> None:
    write_log(tmp_path, range(1, 9))
    evaluated(tmp_path, 2, 20.0)
    evaluated(tmp_path, 7, 70.0)
    Feeder(TensorBoardTracker(told(tmp_path)), tmp_path, step=0, say=pytest.fail).replay()
    keep_until(tmp_path, 5)
    write_log(tmp_path, range(6, 12))
    Feeder(TensorBoardTracker(told(tmp_path)), tmp_path, step=5, say=pytest.fail).replay()
    shown = of_tensorboard(tmp_path)  # which refuses a point that is there twice
    points = [(step, row["watched/held/PPL"]) for step, row in shown if "watched/held/PPL" in row]
    assert points == [(2, 20.0), (7, 70.0)]


READ: dict[str, Callable[[Path], Sink]] = {
    "comet": of_comet,
    "tensorboard": of_tensorboard,
    "trackio": lambda run: of_trackio(run.parent / "trackio"),
    "wandb": of_wandb,
}


def track(run: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command with clients that know no server."""
    offline = {"WANDB_MODE": "offline", "COMET_START_ONLINE": "0"}
    offline |= {"TRACKIO_DIR": str(run.parent / "trackio")}
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **offline, **environment}
    return forked("olm_train.cli", "track", run, *options, environment=env, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", READ)
def test_a_finished_run_is_brought_there_once_and_again_only_what_is_missing(
    tmp_path: Path, tracker: str
) -> None:
    run = tmp_path / "run"
    write_log(run, range(1, 31))
    done = track(run, "--to", tracker)
    assert (done.returncode, done.stdout) == (
        0,
        f"{tracker}: 30 steps brought, up to step 30\n",
    ), done.stderr
    same(READ[tracker](run), logged(run), digits=5)
    keep_until(run, 17)
    write_log(run, range(18, 41))
    done = track(run, "--to", tracker)
    assert f"{tracker}: " in done.stdout, done.stderr
    same(READ[tracker](run), logged(run), digits=5)


def test_options_are_those_of_the_run_and_the_command(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_log(run, range(1, 3))
    options = {
        "name": "of the run", "project": "lab", "entity": "us", "group": "g", "tags": ["t1"],
        "notes": "with abcdefgh12345678", "cancel_tags": ["stop"],
    }  # fmt: skip
    config = {"seed": 3, "trainer": {"callbacks": {"wandb": options}}}
    append_start(run, Start(step=0, rewound=0, lock="l", global_batch_size=8, world_size=1,
                            skip=(), config=config))  # fmt: skip
    done = track(run, "--to", "wandb", "--name", "mine", LAB_API_KEY="abcdefgh12345678")
    assert done.returncode == 0, done.stderr
    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    for record in records_of_wandb(path):
        if record.WhichOneof("record_type") == "run":
            break
    told = record.run
    assert (told.display_name, told.project, told.entity) == ("mine", "lab", "us")
    assert (told.run_group, list(told.tags), told.notes) == ("g", ["t1"], "with ***")
    shown = {item.key: json.loads(item.value_json) for item in told.config.update}
    assert shown["seed"] == 3
    assert told.host == ""


def test_a_dry_run_touches_nothing(tmp_path: Path) -> None:
    write_log(tmp_path / "run", range(1, 4))
    words = [str(tmp_path / "run"), "--to", "tensorboard", "--dry-run"]
    assert "3 steps, for tensorboard" in CliRunner().invoke(main, words).stdout
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_written_to_is_an_error_for_people(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 3))
    write_tracked(tmp_path, "tensorboard", TrackerState(key="tensorboard", step=1))
    (tmp_path / "tracking.json.tmp").mkdir()  # stands for a mount that is read-only for root too
    done = CliRunner().invoke(main, [str(tmp_path), "--to", "tensorboard"])
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 4
    assert "tracking.json.tmp" in done.stderr


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [str(tmp_path), "--to", "tensorboard"])
    assert done.exit_code == 4
    assert "not a run folder" in done.stderr


def test_a_server_that_is_not_there_ends_the_command_with_what_to_do(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_log(run, range(1, 4))
    done = track(run, "--to", "trackio", TRACKIO_SERVER_URL="http://127.0.0.1:1/?write_token=x")
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 6)


OWN = """
from dataclasses import dataclass
from typing import ClassVar
from olm_train.extensions.tracking.callback import TrackerCallback

@dataclass(kw_only=True)
class Mine(TrackerCallback):
    kind: ClassVar[str] = "mine"
    package: ClassVar[str] = "json"
    place: str = "here"
"""


def test_a_tracker_of_ones_own_is_named_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_tracker_of_a_lab.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    path = "own_tracker_of_a_lab:Mine"
    kind: Any = named(path)
    assert configured(kind, {}) == kind()
    section = {"name": path, "place": "there", "project": "lab"}
    config = {"trainer": {"callbacks": {"tensorboard": None, "ours": section}}}
    assert configured(kind, config) == kind(place="there", project="lab")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensorbord", "did you mean 'tensorboard'"),
        ("json:JSONDecoder", "not a subclass of TrackerCallback"),
        ("no_such_module_here:Class", "there is no module"),
    ],
)
def test_a_tracker_that_is_not_there_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        named(name)
    assert said in f"{refused.value} {refused.value.fix}"
