"""The mixture so far is counted over the stages, without the rows left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from olm_data.extensions.report.run_view import shares
from olm_data.mixture.lock import Lock


def test_what_was_asked_for_follows_the_stages(lock: Path) -> None:
    mixture = Lock.read(lock)
    schedule = mixture.schedule()
    found = {share.source: share for share in shares(mixture, schedule, 25, [(2, 5), (30, 40)])}
    kept = np.r_[0:2, 5:25]
    count = np.bincount(schedule.locate(kept).source, minlength=2)
    assert found["a"].drawn == pytest.approx(count[0] / 22)
    assert found["b"].tokens == 16 * count[1]
    # 20 rows of `main` at 3:1, then 5 of `anneal`, which is all b
    assert found["a"].asked == pytest.approx(15 / 25)
    assert found["b"].asked == pytest.approx(10 / 25)


def test_a_run_without_a_row_has_drawn_nothing(lock: Path) -> None:
    mixture = Lock.read(lock)
    assert all(share.drawn == 0 for share in shares(mixture, mixture.schedule(), 0, []))
