"""A small ladder that was trained once, on a CPU: its fit and its forecast stay what they were.

Widths 16, 32 and 64 (two layers, 512 tokens, rows of 64) on Python's standard library; then width
128, which was forecast first. All at one rate, which is too high for the widest: the sizes
are hardly told apart, and the fit says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_train.extensions.ladder.fit import fitted
from olm_train.extensions.ladder.forecast import foreseen
from olm_train.extensions.ladder.points import frontier, read_points

POINTS = frontier(read_points(Path(__file__).with_name("ladder.jsonl")))
TARGET, TARGET_LOSS = (492_160, 1_048_576, 3.1966e12), 3.1048


def test_the_fit_is_what_it_was() -> None:
    found = fitted(POINTS)
    assert (found.points, found.sizes, found.held_out_error) == (9, 3, None)
    assert found.residual == pytest.approx(0.0290, rel=0.01)
    assert found.law.beta == pytest.approx(0.299, rel=0.01)
    assert found.law._asdict()["E"] == pytest.approx(1.731, rel=0.01)


def test_what_the_points_leave_open_is_said() -> None:
    assert fitted(POINTS).warnings[0].startswith("9 runs determine alpha +-16")


def test_the_forecast_made_before_the_larger_run_holds_it() -> None:
    said = foreseen(POINTS, *TARGET, "code")
    assert said.loss == pytest.approx(3.0923, rel=1e-3)
    assert said.low < TARGET_LOSS < said.high
    assert said.loss / TARGET_LOSS - 1 == pytest.approx(-0.0040, abs=0.001)
