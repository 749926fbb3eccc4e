"""`olm-train track`: a finished run on a tracker it never had, in the real clients."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.forked import forked
from support.runs import REPOSITORY
from support.tracked import (
    Sink,
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
from olm_data.run_log.log import Start, append_start, keep_until
from olm_train.extensions.tracking.command import configured, main, named
from olm_train.extensions.tracking.feeder import TrackerState, write_tracked

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
