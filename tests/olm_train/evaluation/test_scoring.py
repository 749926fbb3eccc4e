"""Means, errors and differences of scores, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from olm_train.evaluation.scoring import TaskScores, change, line_of_task, mean_and_error

COUNTS = {"questions": 4, "left out": 0, "truncated": 0, "ties": 0}


def test_the_standard_error_is_that_of_a_mean_of_questions_that_count() -> None:
    mean, error = mean_and_error(np.array([1.0, 0.0, 1.0, 1.0, np.nan]))
    assert mean == 0.75
    assert error == pytest.approx(0.5 / math.sqrt(4))
    assert all(map(math.isnan, mean_and_error(np.array([np.nan]))))


def test_a_difference_is_taken_question_by_question() -> None:
    before, now = np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 1.0, 0.0, 1.0])
    found = change(now, before)
    assert (found.mean, found.questions) == (0.25, 4)
    assert found.error == pytest.approx(0.25)
    assert found.p == pytest.approx(0.3173, abs=1e-4), "one standard error"
    assert change(now, now).p == 1.0
    assert math.isnan(change(now + 1, now).p), "without a spread nothing can be told"
    assert found.metrics("acc") == {"acc change": 0.25, "acc change stderr": found.error}


def test_a_line_says_what_was_left_out() -> None:
    values = {"acc": np.array([1.0, 0.0, 1.0, 1.0]), "BPB": np.full(4, 0.5)}
    scores = TaskScores("d", "acc", values, COUNTS)
    results = scores.metrics()
    assert results["acc stderr"] == pytest.approx(0.25)
    assert line_of_task(results) == "acc 0.7500 +- 0.2500   BPB 0.5000   (4 questions)"
    results |= {"ties": 2, "truncated": 3, "left out": 1}
    results |= change(values["acc"], np.zeros(4)).metrics("acc")
    assert line_of_task(results) == (
        "acc 0.7500 +- 0.2500, change +0.7500 +- 0.2500 (p 0.0027)   BPB 0.5000   "
        "(4 questions, 1 left out, 2 ties, 3 requests truncated)"
    )
