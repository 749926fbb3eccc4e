from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.runs import build_trainer, one_step_trainer

from olm_data.errors import UsageError
from olm_train.callbacks.averaged_weights import in_place_of_weights, weights_of
from olm_train.callbacks.base import Callback
from olm_train.callbacks.early_stopping import EarlyStoppingCallback
from olm_train.callbacks.ema import EMACallback
from olm_train.callbacks.model_merge import ModelMergeCallback
from olm_train.optim.averaging import RunningMean
from olm_train.stability.report import NonFiniteError


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


def test_two_means_of_one_name_are_refused_before_the_first_step(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    both: dict[str, Callback] = {
        "ema": EMACallback(output_suffix="merged"),
        "model_merge": ModelMergeCallback(),
    }
    trainer = build_trainer(tiny_mixture, tmp_path, callbacks=both)
    with pytest.raises(
        UsageError, match=r"ema and model_merge both save weights as step\.\.\.-merged"
    ):
        trainer.fit()
    assert trainer.step == 0


class NotANumber(Callback):
    """The loss of one step is NaN."""

    def __init__(self, step: int) -> None:
        self.bad = step

    def pre_train(self) -> None:
        self.trainer.train_module.model.norm.register_forward_hook(self._poison)

    def _poison(self, _module: object, _inputs: object, out: torch.Tensor) -> torch.Tensor:
        return out * torch.nan if self.trainer.step == self.bad - 1 else out


def test_no_mean_is_saved_of_a_bad_step_that_nobody_has_read_yet(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        "--trainer.metrics_collect_interval=4",
        "--trainer.callbacks.lm_evaluator.enabled=false",
        callbacks={"ema": EMACallback(save_interval=3), "bad": NotANumber(5)},
    )
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert [path.name for path in tmp_path.glob("*-ema")] == ["step00000003-ema"]
