"""Comet against a server on loopback, trackio in its own file: each point once, one run."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.comet_stub import CometService
from support.forked import forked
from support.runs import REPOSITORY
from support.service_stub import serving
from support.tracked import MODES, logged, of_comet, of_trackio, same, trained_beside, write_log

from olm_data.extensions.watching.follow import StepReader
from olm_data.run_log.log import keep_until
from olm_train.callbacks.notice import NotificationSetting
from olm_train.extensions.tracking.base import Tracker
from olm_train.extensions.tracking.callback import CANCEL_TAGS
from olm_train.extensions.tracking.comet import CometCallback, flat
from olm_train.extensions.tracking.feeder import Feeder

KEY = "abcdefghABCDEFGH0123456"
PATIENT = 300.0
"""A slow machine is no server that hangs."""
CONFIG = {"seed": 3, "model": {"width": 8, "tags": ["a", "b"]}}


@pytest.fixture
def comet(monkeypatch: pytest.MonkeyPatch) -> Iterator[CometService]:
    service = CometService()
    with serving(service) as url:
        monkeypatch.setenv("COMET_URL_OVERRIDE", f"{url}/clientlib/")
        monkeypatch.setenv("COMET_API_KEY", KEY)
        yield service


def feed(run: Path, callback: CometCallback, step: int = 0, ending: str = "finished") -> list[str]:
    """Feed all of a log as a start of the run at `step` does; return what was said."""
    said: list[str] = []
    feeder = Feeder(
        callback.tracker(callback.tracked_run(run, CONFIG)), run, step=step, say=said.append,
        cancel=said.append, cancel_interval=callback.check_interval(), patience=PATIENT,
    )  # fmt: skip
    feeder.start()
    failure = ("run failed", "ValueError: no") if ending == "failed" else None
    feeder.close(ending, failure)  # type: ignore[arg-type]
    return said


def test_a_run_is_shown_with_its_options_and_the_times_of_its_log(
    comet: CometService, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    write_log(run, range(1, 13))
    options = {"name": "n", "project": "lab", "workspace": "us", "tags": ("t1", "t2")}
    assert feed(run, CometCallback(**options, config={"lr": 0.1})) == []  # type: ignore[arg-type]
    (experiment,) = comet.experiments.values()
    same(experiment.rows(), logged(run))
    assert (experiment.project, experiment.workspace) == ("lab", "us")
    assert (experiment.others, experiment.tags) == ({"Name": "n"}, ["t1", "t2"])
    assert experiment.parameters == {"lr": "0.1"}
    assert experiment.points[0]["timestamp"] == 1000 * (10**9 + 1)
    assert experiment.alive[0]
    assert not experiment.alive[-1]


def test_names_are_those_of_the_run_and_its_configuration(
    comet: CometService, tmp_path: Path
) -> None:
    write_log(tmp_path / "run", range(1, 3))
    feed(tmp_path / "run", CometCallback())
    (experiment,) = comet.experiments.values()
    assert (experiment.project, experiment.others) == ("olm", {"Name": "run"})
    assert experiment.parameters == {"seed": "3", "model.width": "8", "model.tags": '["a", "b"]'}


def test_a_start_further_back_goes_on_and_no_point_is_there_twice(
    comet: CometService, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    write_log(run, range(1, 21))
    feed(run, CometCallback(), ending="stopped")
    keep_until(run, 12)
    write_log(run, range(13, 31))
    feed(run, CometCallback(), 12)
    (experiment,) = comet.experiments.values()
    same(experiment.rows(), logged(run))


def test_points_that_arrived_without_our_knowing_are_not_sent_again(
    comet: CometService, tmp_path: Path
) -> None:
    write_log(tmp_path, range(1, 21))
    callback = CometCallback()
    tracker = callback.tracker(callback.tracked_run(tmp_path, {}))
    steps = list(StepReader(tmp_path).read(complete=True))
    key = tracker.open(None, 0)
    tracker.truncate(20)
    tracker.log(steps[:7])
    comet.experiments[key].points[-2:] = []  # a batch that was cut in the middle of a step
    tracker = callback.tracker(callback.tracked_run(tmp_path, {}))
    assert tracker.open(key, 3) == key
    assert tracker.truncate(20) == 3
    tracker.log(steps[3:])
    same(comet.experiments[key].rows(), logged(tmp_path))


def test_each_start_has_an_experiment_where_it_is_told_so(
    comet: CometService, tmp_path: Path
) -> None:
    write_log(tmp_path, range(1, 6))
    feed(tmp_path, CometCallback(auto_resume=False))
    write_log(tmp_path, range(6, 9))
    feed(tmp_path, CometCallback(auto_resume=False), 5)
    first, second = comet.experiments.values()
    assert [step for step, _ in first.rows()] == [*range(1, 6)]
    same(second.rows(), logged(tmp_path))


@pytest.mark.parametrize("tag", ["Cancelled", "mine", "other"])
def test_a_tag_given_there_ends_the_run(comet: CometService, tmp_path: Path, tag: str) -> None:
    write_log(tmp_path, range(1, 6))
    callback = CometCallback(tags=(tag,), cancel_check_interval=4)
    assert callback.cancel_tags == CANCEL_TAGS
    assert feed(tmp_path, callback) == (["tag Cancelled"] if tag == "Cancelled" else [])
    write_log(tmp_path, range(6, 11))
    own = CometCallback(cancel_tags=("Mine", "MINE 2"), cancel_check_interval=4)
    assert feed(tmp_path, own, 5) == (["tag mine"] if tag == "mine" else [])
    asked = len(comet.asked)
    write_log(tmp_path, range(11, 21))
    feed(tmp_path, CometCallback(cancel_tags=(), cancel_check_interval=4), 10)
    assert not any("experiment/tags" in path for path in comet.asked[asked:])


@pytest.mark.parametrize("setting", NotificationSetting)
@pytest.mark.parametrize("ending", ["finished", "stopped", "failed"])
def test_mails_are_those_that_were_asked_for(
    comet: CometService, tmp_path: Path, setting: NotificationSetting, ending: str
) -> None:
    write_log(tmp_path, range(1, 4))
    callback = CometCallback(name="n", notifications=setting, failure_tag="broken")
    feed(tmp_path, callback, ending=ending)
    (experiment,) = comet.experiments.values()
    word = {"finished": "completed", "stopped": "stopped", "failed": "failed"}[ending]
    wanted = {
        "none": [],
        "all": ["started", word],
        "end_only": [word] if ending != "stopped" else [],
        "failure_only": [word] if ending == "failed" else [],
    }[setting]
    assert [mail["status"] for mail in experiment.mails] == wanted
    assert experiment.tags == (["broken"] if ending == "failed" else [])
    if wanted and ending == "failed":
        last = experiment.mails[-1]["additional_data"]
        assert last == {"Step": "3", "Error": "run failed: ValueError: no"}


def test_without_a_key_it_says_what_to_do(
    comet: CometService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMET_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    write_log(tmp_path, range(1, 4))
    said = feed(tmp_path, CometCallback())
    assert "no API key for Comet" in said[0]
    assert "COMET_API_KEY" in said[0]


@pytest.mark.slow  # the client pauses between its attempts
def test_a_server_that_comes_back_gets_everything(comet: CometService, tmp_path: Path) -> None:
    """The client tries a request again by itself; here it gives up, and the feeder goes on."""
    write_log(tmp_path, range(1, 6))
    callback = CometCallback()
    tracker = callback.tracker(callback.tracked_run(tmp_path, {}))
    key = tracker.open(None, 0)
    steps = list(StepReader(tmp_path).read(complete=True))
    tracker.truncate(5)
    comet.mode = "500"
    with pytest.raises(Exception, match="500"):
        tracker.log(steps)
    comet.mode = "ok"
    assert tracker.open(key, 0) == key
    assert tracker.truncate(5) == 0
    tracker.log(steps)
    same(comet.experiments[key].rows(), logged(tmp_path))


@pytest.mark.slow
def test_whatever_the_server_does_no_loss_changes_and_it_is_told(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    services = {mode: CometService(mode) for mode in MODES}

    def variables(url: str) -> dict[str, str]:
        return {"COMET_URL_OVERRIDE": f"{url}/clientlib/", "COMET_API_KEY": KEY}

    said = trained_beside(services, "comet", variables, tiny_mixture, tmp_path)
    assert KEY not in "".join(said.values())
    (experiment,) = services["ok"].experiments.values()
    same(experiment.rows(), logged(tmp_path / "ok"))
    assert "comet" not in said["ok"].lower()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.delenv("COMET_API_KEY", raising=False)


def tracker(folder: Path) -> Tracker:
    callback = CometCallback(name="n", project="lab", workspace="us", tags=("t",))
    return callback.tracker(callback.tracked_run(folder, {"seed": 3, "model": {"width": 8}}))


@pytest.mark.usefixtures("offline")
def test_the_archive_has_the_log_and_is_what_the_uploader_takes(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 13))
    first = tracker(tmp_path)
    key = first.open(None, 0)
    assert first.truncate(0) == 0
    first.log(list(StepReader(tmp_path).read(complete=True)))
    first.close("failed")
    same(of_comet(tmp_path), logged(tmp_path))
    with zipfile.ZipFile(tmp_path / f"comet/{key}.zip") as file:
        told = json.loads(file.read("experiment.json"))
    assert (told["offline_id"], told["project_name"], told["workspace"]) == (key, "lab", "us")
    assert told["tags"] == ["t", "failed"]
    service = CometService()
    with serving(service) as url:
        done = subprocess.run(
            [sys.executable, "-m", "comet_ml.scripts.comet_upload", f"comet/{key}.zip"],
            env={"COMET_URL_OVERRIDE": f"{url}/clientlib/", "COMET_API_KEY": "k" * 25,
                 "COMET_ERROR_TRACKING_ENABLE": "0", "HOME": str(tmp_path), "PATH": "/usr/bin"},
            cwd=tmp_path, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    assert list(service.experiments) == [key], done.stderr
    experiment = service.experiments[key]
    same(experiment.rows(), logged(tmp_path))
    assert experiment.parameters == {"seed": "3", "model.width": "8"}
    assert experiment.others["Name"] == "n"
    assert experiment.tags == ["t", "failed"]
    assert (experiment.project, experiment.workspace) == ("lab", "us")


@pytest.mark.usefixtures("offline")
def test_a_start_makes_the_archive_anew_whatever_the_one_before_left(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 21))
    first = tracker(tmp_path)
    key = first.open(None, 0)
    first.truncate(0)
    first.log(list(StepReader(tmp_path).read(complete=True)))
    with (tmp_path / f"comet/{key}/messages.json").open("a") as file:
        file.write('{"payload')  # killed
    keep_until(tmp_path, 12)
    write_log(tmp_path, range(13, 26))
    second = tracker(tmp_path)
    assert second.open(key, 20) == key
    assert second.truncate(12) == 0
    second.log(list(StepReader(tmp_path).read(complete=True)))
    second.close("finished")
    same(of_comet(tmp_path), logged(tmp_path))


def test_parameters_have_dotted_names() -> None:
    config = {"a": {"b": {"c": 1}, "d": None}, "e": "text", "f": [1, {"g": 2}]}
    assert flat(config) == {"a.b.c": "1", "a.d": "null", "e": "text", "f": '[1, {"g": 2}]'}


def ran(program: str, tmp_path: Path, *words: Path) -> None:
    """Run a program in a process of its own: the client reads its folder when it is imported."""
    (tmp_path / "trackio_program.py").write_text(program)
    paths = f"{REPOSITORY}:{REPOSITORY / 'tests'}:{tmp_path}"
    home = {"TRACKIO_DIR": str(tmp_path / "db"), "HOME": str(tmp_path), "PYTHONPATH": paths}
    done = forked("trackio_program", *words, environment=home, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


PROGRAM = """
import sys
from pathlib import Path
from olm_train.extensions.tracking.trackio import TrackioCallback
from olm_train.extensions.tracking.command import replay
options = dict(project="lab", name="same", group="g")
for folder in sys.argv[1:]:
    replay(Path(folder), TrackioCallback(**options), {"seed": 1})
"""


@pytest.mark.slow
def test_runs_of_one_name_stay_apart_and_each_is_found_again(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write_log(one, range(1, 6))
    write_log(other, range(1, 4))
    ran(PROGRAM, tmp_path, one, other, one)
    with sqlite3.connect(tmp_path / "db/lab.db") as file:
        counts = file.execute("SELECT run_name, COUNT(*) FROM metrics GROUP BY run_id").fetchall()
        groups = file.execute("SELECT config FROM configs").fetchall()
    assert sorted(counts) == [("same", 5), ("same-2", 3)]
    shown = [json.loads(text) for (text,) in groups]  # bytes or text, by the client's encoder
    assert [config["_Group"] for config in shown] == ["g", "g"]
    assert shown[0]["config"] == {"seed": 1}


LOSES = """
import os, sqlite3, sys
from pathlib import Path
from support.polling import wait_until
from olm_data.errors import StorageError
from olm_data.extensions.watching.follow import StepReader
from olm_train.extensions.tracking.trackio import TrackioCallback
callback, folder = TrackioCallback(project="lab"), Path(sys.argv[1])
tracker = callback.tracker(callback.tracked_run(folder, {}))
key = tracker.open(None, 0)
assert tracker.truncate(0) == 0
tracker.log(list(StepReader(folder).read(complete=True)))
path = Path(os.environ["TRACKIO_DIR"]) / "lab.db"
def count():
    try:
        return sqlite3.connect(path).execute("SELECT COUNT(*) FROM metrics").fetchone()[0]
    except sqlite3.OperationalError:  # no table yet
        return 0
wait_until(lambda: path.exists() and count() == 9, "rows")
with sqlite3.connect(path) as file:  # the client only warns of rows that a full disk refuses
    file.execute("DELETE FROM metrics WHERE step IN (4, 5)")
try:
    tracker.close("finished")
except StorageError as error:
    assert "dropped 2 rows" in error.what
else:
    sys.exit("nothing was said of rows that are not there")
assert tracker.open(key, 9) == key
assert tracker.truncate(9) == 3
tracker.log(list(StepReader(folder, 4).read(complete=True)))
tracker.close("finished")
assert count() == 9
"""


@pytest.mark.slow
def test_rows_that_the_client_dropped_are_found_when_the_run_is_opened_again(
    tmp_path: Path,
) -> None:
    write_log(tmp_path / "run", range(1, 10))
    ran(LOSES, tmp_path, tmp_path / "run")


BACK = """
import sys
from pathlib import Path
from support.tracked import evaluated, write_log
from olm_data.run_log.log import keep_until
from olm_train.extensions.tracking.feeder import Feeder
from olm_train.extensions.tracking.trackio import TrackioCallback
callback, folder = TrackioCallback(project="lab"), Path(sys.argv[1])
def feed(step):
    tracker = callback.tracker(callback.tracked_run(folder, {}))
    Feeder(tracker, folder, step=step, say=sys.exit).replay()
write_log(folder, range(1, 9))
evaluated(folder, 2, 20.0)
evaluated(folder, 7, 70.0)
feed(0)
keep_until(folder, 5)
write_log(folder, range(6, 12))
feed(5)
"""


@pytest.mark.slow
def test_an_evaluation_made_beside_the_run_is_there_once_where_the_run_goes_back(
    tmp_path: Path,
) -> None:
    ran(BACK, tmp_path, tmp_path / "run")
    rows = of_trackio(tmp_path / "db")
    points = [(n, row["watched/held/PPL"]) for n, row in rows if "watched/held/PPL" in row]
    assert sorted(points) == [(2, 20.0), (7, 70.0)]
    assert sorted({n for n, _ in rows}) == [*range(1, 12)]
