"""A save folder is one run's at a time; how it is taken over: faults/test_67."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import ConflictError, UsageError
from olm_train.distributed.holding import LeasePolicy, RunLock
from olm_train.distributed.world import World


def holding(folder: Path, work_dir: Path | None = None) -> RunLock:
    return RunLock(str(folder), work_dir or folder, World(), LeasePolicy(), print)


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with holding(tmp_path) as held:
        held.check()
        assert not held.lost
        with pytest.raises(ConflictError, match="another process trains into this folder"):
            holding(tmp_path).__enter__()
    with holding(tmp_path):
        pass


def test_another_work_dir_is_held_too_and_given_back_where_it_is_refused(tmp_path: Path) -> None:
    first, second, logs = (tmp_path / name for name in ("first", "second", "logs"))
    with holding(first, logs):
        with pytest.raises(ConflictError):
            holding(second, logs).__enter__()
        with holding(second):  # it was not kept
            pass


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_time_without_a_sign_of_life_has_limits(seconds: float) -> None:
    with pytest.raises(UsageError, match="takeover_seconds is at"):
        LeasePolicy(takeover_seconds=seconds)


def test_a_run_does_not_write_over_something_else(tmp_path: Path) -> None:
    for kind, files in {
        "a dataset": {"manifest.json": '{"format": "olm-dataset"}'},
        "a checkpoint": {"manifest.json": '{"format": "olm-checkpoint"}'},
        "a model": {"config.json": "{}", "model.safetensors": ""},
    }.items():
        folder = tmp_path / kind
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        with pytest.raises(ConflictError, match=f"the save folder is {kind}"):
            holding(folder).__enter__()
        assert {path.name for path in folder.iterdir()} == {*files}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")  # of one that was killed before a step
    for name in ("run", "new", "."):
        with holding(tmp_path / name):
            pass
