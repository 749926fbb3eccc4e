from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.runs import one_step_trainer

from olm_train.callbacks.averaged_weights import in_place_of_weights, weights_of
from olm_train.callbacks.early_stopping import EarlyStoppingCallback
from olm_train.optim.averaging import RunningMean


def test_other_weights_are_in_the_model_and_its_own_come_back_whatever_happens(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = one_step_trainer(tiny_mixture, tmp_path)
    trainer.fit()
    module = trainer.train_module
    before = {name: weight.clone() for name, weight in weights_of(module).items()}
    mean = RunningMean(before)
    mean.update({name: weight + 1 for name, weight in before.items()}, 1)

    def evaluator() -> None:
        for name, weight in weights_of(module).items():
            assert torch.equal(weight, before[name] + 1)
        raise RuntimeError("evaluators may fail")

    with (
        pytest.raises(RuntimeError, match="evaluators may fail"),
        in_place_of_weights(module, mean.mean),
    ):
        evaluator()
    assert all(torch.equal(w, before[name]) for name, w in weights_of(module).items())
    assert all(torch.equal(mean.mean[name], w + 1) for name, w in before.items())


def test_early_stopping_looks_at_merged_weights_only_where_it_is_told_to() -> None:
    results = {"held": {"CE loss": 3.0}, "merged/held": {"CE loss": 1.0}}
    assert EarlyStoppingCallback()._value(results) == 3.0
    assert EarlyStoppingCallback(dataset="merged/held")._value(results) == 1.0
    assert EarlyStoppingCallback()._value({"merged/ema/held": {"CE loss": 1.0}}) is None
