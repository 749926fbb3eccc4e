"""Archives without a server: cut at any step, gone on with, and taken by Comet's own uploader."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.comet_stub import CometService
from support.service_stub import serving
from support.tracked import logged, of_comet, same, write_log

from olm_data.extensions.watching.follow import StepReader
from olm_data.run_log.log import keep_until
from olm_train.extensions.tracking.base import Tracker
from olm_train.extensions.tracking.comet import CometCallback, flat


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.delenv("COMET_API_KEY", raising=False)


def tracker(folder: Path) -> Tracker:
    callback = CometCallback(name="n", project="lab", workspace="us", tags=("t",))
    return callback.tracker(callback.tracked_run(folder, {"seed": 3, "model": {"width": 8}}))


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
