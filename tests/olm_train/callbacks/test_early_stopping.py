from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.runs import build_trainer, steps_of

from olm_data.errors import UsageError
from olm_train.callbacks.early_stopping import EarlyStoppingCallback


class Trainer:
    """Takes what a callback asks for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cancel_run(self, reason: str, *, by: str) -> None:
        assert by == "early_stopping"
        self.asked.append(reason)


def stops_at(values: list[float], *, cut: int = 0, **options: Any) -> int | None:
    """Return the evaluation, from 0, at which the run is cancelled; `cut`: resumed before that."""
    callback = EarlyStoppingCallback(**options)
    callback.trainer = trainer = Trainer()  # type: ignore[assignment]
    for number, value in enumerate(values):
        if number == cut:
            state = json.loads(json.dumps(callback.state_dict()))
            callback = EarlyStoppingCallback(**options)
            callback.load_state_dict(state)
            callback.trainer = trainer  # type: ignore[assignment]
        results = {"web": {"CE loss": value, "acc": -value}, "code": {"CE loss": 1.0, "acc": 0.0}}
        callback.log_evaluation(100 * number, results)
        if trainer.asked:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "options", "at"),
    [
        ([5, 4, 3, 3, 3], {"patience": 2}, 4),
        ([5, 4, 3, 3, 2, 2, 2], {"patience": 2}, 6),  # a better one begins anew
        ([5, 4, 3, 2, 1], {"patience": 1}, None),
        ([5, 4.9, 4.8, 4.7], {"patience": 2, "min_delta": 1.0}, 2),
        ([5, 4, 3], {"patience": 2, "metric": "acc"}, 2),
        ([5, 4, 3], {"patience": 2, "metric": "acc", "mode": "max"}, None),
        ([5, 4, 3], {"patience": 2, "dataset": "code"}, 2),
        ([5, math.nan, math.nan], {"patience": 2}, 2),
        ([math.nan, 5, 4], {"patience": 1}, None),
        ([1, 2, 3, 4, 5, 6], {}, 5),  # patience 5
    ],
)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_it_stops_after_so_many_evaluations_without_a_better_one(
    values: list[float], options: dict[str, Any], at: int | None, cut: int
) -> None:
    assert stops_at(values, cut=cut, **options) == at


def test_data_sets_that_were_not_looked_at_count_for_nothing() -> None:
    assert stops_at([1, 2, 3, 4], patience=1, dataset="another") is None


def test_a_metric_that_no_evaluation_has_is_an_error() -> None:
    with pytest.raises(UsageError, match="has no 'accuracy', but CE loss, acc"):
        stops_at([1.0], metric="accuracy")


def test_a_run_ends_early_and_says_why(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["patience=1", "min_delta=100.0"]
    given = [f"--trainer.callbacks.early_stopping.{option}" for option in options]
    trainer = build_trainer(tiny_mixture, tmp_path, *given)
    trainer.fit()
    steps = [line["step"] for line in steps_of(tmp_path)]
    assert steps == [*range(1, 19)]  # evaluations after 9 and 18
    assert "cancelled at step 18 by early_stopping (CE loss has not been" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["lm_evaluator.enabled=false", "early_stopping.patience=1"], "evaluates a data set"),
        (["early_stopping.dataset=heldd"], "evaluates heldd"),
        (["early_stopping.dataset=merged/ema/held"], "evaluates merged/ema/held"),
    ],
)
def test_one_that_no_evaluation_could_stop_is_refused(
    tiny_mixture: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    given = [f"--trainer.callbacks.{option}" for option in options]
    trainer = build_trainer(tiny_mixture, tmp_path, *given)
    with pytest.raises(UsageError, match=said):
        trainer.fit()
    assert trainer.step == 0
