"""A save folder is one run's at a time; how it is taken over: faults/test_67."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import ConflictError, UsageError
from olm_train.distributed.holding import Holding, LeasePolicy
from olm_train.distributed.world import World


def holding(folder: Path, work_dir: Path | None = None) -> Holding:
    return Holding(str(folder), work_dir or folder, World(), LeasePolicy(), print)


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
