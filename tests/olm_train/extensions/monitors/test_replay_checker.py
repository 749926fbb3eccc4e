"""Steps taken again are compared with the log: bit for bit, or within a tolerance."""

from __future__ import annotations

import math

import pytest

from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM
from olm_train.extensions.monitors.replay_checker import first_difference


@pytest.mark.parametrize(
    ("was", "now", "tolerance", "same"),
    [
        (2.0, 2.0, 0.0, True),
        (2.0, math.nextafter(2.0, 3.0), 0.0, False),
        (2.0, 2.001, 1e-3, True),
        (2.0, 2.003, 1e-3, False),
        (None, math.inf, 0.0, True),
        (None, 2.0, 1.0, False),
    ],
)
def test_a_value_is_the_same_within_the_tolerance_alone(
    was: float | None, now: float, tolerance: float, same: bool
) -> None:
    logged = {3: {CE_LOSS: 1.0, GRAD_NORM: was}}
    again = {3: {CE_LOSS: 1.0, GRAD_NORM: now}}
    problem = first_difference(logged, again, tolerance)
    assert (problem is None) == same
    assert same or f"step 3: {GRAD_NORM} is {now!r}, logged was {was!r}" == problem


def test_the_first_step_that_differs_is_named() -> None:
    logged = {step: {CE_LOSS: 1.0, GRAD_NORM: 1.0} for step in (8, 9, 10)}
    again = {step: {CE_LOSS: float(step < 9), GRAD_NORM: 1.0} for step in (10, 9, 8)}
    assert (first_difference(logged, again, 0.0) or "").startswith("step 9:")
