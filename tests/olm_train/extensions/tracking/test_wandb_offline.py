"""Without a server: each start writes the whole run into one file."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tracked import evaluated, logged, of_wandb, same, write_log

from olm_data.run_log.log import keep_until
from olm_train.extensions.tracking.feeder import Feeder
from olm_train.extensions.tracking.wandb import WandBCallback


def test_a_start_further_back_leaves_one_file_with_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    callback = WandBCallback()
    for step, steps in ((0, range(1, 21)), (12, range(13, 31))):
        keep_until(tmp_path, step)
        write_log(tmp_path, steps)
        evaluated(tmp_path, 2, 20.0)
        tracker = callback.tracker(callback.tracked_run(tmp_path, {}))
        Feeder(tracker, tmp_path, step=step, say=pytest.fail).replay()
        wandb.teardown()  # as the end of a process: its service goes on writing until then
        rows = of_wandb(tmp_path)
        same(rows[:-1], logged(tmp_path))
        assert rows[-1][1] == {"watched/held/PPL": 20.0, "watched/step": 2}
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
