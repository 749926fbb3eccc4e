"""Row 58: rows that are left out by hand are recorded, and change the order the same way always."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import build_trainer, metrics

from olm_data.extensions.verify.training import verify_training
from olm_data.mixture.lock import Lock
from olm_data.run_log.log import RunLog, read_starts

STEPS = "--trainer.max_duration={value: 12, unit: steps}"
SKIP = "--data_loader.skip=[[32, 48]]"  # steps 5 and 6


def orders(folder: Path) -> list[str]:
    return [line["order"] for line in metrics(folder) if "eval" not in line]


@pytest.mark.slow
def test_58_skipped_steps_are_recorded_and_change_the_digests_deterministically(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    build_trainer(tiny_mixture, tmp_path / "whole", STEPS).fit()
    build_trainer(tiny_mixture, tmp_path / "one", STEPS, SKIP).fit()
    other = STEPS, SKIP, "--train_module.rank_microbatch_size=32", "--data_loader.prefetch=0"
    build_trainer(tiny_mixture, tmp_path / "other", *other).fit()
    whole, one = orders(tmp_path / "whole"), orders(tmp_path / "one")
    assert one == orders(tmp_path / "other")
    assert one[:4] == whole[:4]
    assert one[4:10] == whole[6:]  # what follows comes two steps earlier, otherwise the same
    assert [start.skip for start in read_starts(tmp_path / "one")] == [((32, 48),)]
    found = verify_training(Lock.read(tiny_mixture), RunLog.read(tmp_path / "one"))
    assert found.agrees
    assert sum(account.skipped for account in found.accounts) == 16
