"""Files of the real offline client, cut at any step, go on in the next one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.polling import wait_until
from support.tracked import of_wandb, write_log

from olm_data.extensions.watching.follow import StepReader
from olm_train.extensions.tracking import wandb as client
from olm_train.extensions.tracking.wandb import WandBCallback


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run of 300 steps, several blocks long."""
    folder = tmp_path_factory.mktemp("wandb")
    write_log(folder, range(1, 301))
    callback = WandBCallback()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WANDB_MODE", "offline")
        tracker = callback.tracker(callback.tracked_run(folder, {}))
        key = tracker.open(None, 0)
        assert tracker.truncate(0) == 0
        tracker.log(list(StepReader(folder).read(complete=True)))
        tracker.close("finished")
    (path,) = client.files_of(folder, key)
    assert path.stat().st_size > 2 * client.BLOCK
    return path


@pytest.mark.parametrize("step", [0, 1, 57, 150, 299, 300, 400])
def test_what_lies_beyond_a_step_is_cut_off(written: Path, tmp_path: Path, step: int) -> None:
    folder = tmp_path / written.parent.parent.name / written.parent.name
    shutil.copytree(written.parent, folder)
    files = [folder / written.name]
    assert client.keep_until(files, step) == min(step, 300)
    assert [n for n, _ in of_wandb(tmp_path)] == [*range(1, min(step, 300) + 1)]


def test_a_record_that_was_being_written_ends_the_file(written: Path, tmp_path: Path) -> None:
    path = tmp_path / written.name
    whole = written.read_bytes()
    before = 0
    for cut in range(len(whole) // 2, len(whole) // 2 + 900, 50):
        path.write_bytes(whole[:cut])
        last = [step for _, step in client.history(path)][-1]
        assert last >= before
        before = last
    assert before < 300


def test_what_the_service_did_not_write_is_found_at_the_end_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_log(tmp_path, range(1, 301))
    callback = WandBCallback()
    tracker = callback.tracker(callback.tracked_run(tmp_path, {}))
    key = tracker.open(None, 0)
    tracker.truncate(0)
    tracker.log(list(StepReader(tmp_path).read(complete=True)))
    (path,) = client.files_of(tmp_path, key)
    wait_until(lambda: path.stat().st_size > client.BLOCK, "a block")
    os.truncate(path, client.BLOCK // 2)  # its service says nothing of a full disk
    there = tracker.close("finished")
    assert there is not None
    assert 0 < there < 300
    tracker.open(key, 300)
    assert tracker.truncate(300) == there
    tracker.log(list(StepReader(tmp_path, there + 1).read(complete=True)))
    assert tracker.close("finished") is None
    assert [step for step, _ in of_wandb(tmp_path)] == [*range(1, 301)]
