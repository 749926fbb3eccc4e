from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import build_trainer, metrics, one_step_trainer

from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback
from olm_train.callbacks.early_stopping import EarlyStoppingCallback
from olm_train.distributed.preempt import Preempted
from olm_train.extensions.averaging.callbacks import (
    EMACallback,
    ModelMergeCallback,
    in_place_of_weights,
    weights_of,
)
from olm_train.extensions.averaging.weighting import RunningMean
from olm_train.stability.report import NonFiniteError
from olm_train.trainer import Trainer


def averaged(lock: Path, folder: Path) -> Trainer:
    """Four steps, with means that are evaluated after the second and the last one."""
    callbacks = "--trainer.callbacks"
    return build_trainer(
        lock,
        folder,
        "--trainer.hard_stop={value: 4, unit: steps}",
        f"{callbacks}.checkpointer={{save_interval: 50}}",
        f"{callbacks}.model_merge={{merge_interval: 2, merge_last_n_steps: 2}}",
        f"{callbacks}.ema={{decay: 0.5, save_interval: 2}}",
    )


class Killed(BaseException):
    """Stands for the end of the process."""


def evaluations(folder: Path) -> list[tuple[int, list[str], Any]]:
    """Those of the log by step and name, whatever the order of one step."""
    found = [line for line in metrics(folder) if "eval" in line]
    return sorted((line["step"], list(line["eval"]), line["eval"]) for line in found)


@pytest.fixture(scope="module")
def undisturbed(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    averaged(tiny_mixture, folder).fit()
    return evaluations(folder)


SLOW = [pytest.param(4, killed, marks=pytest.mark.slow) for killed in (1, 2, 3)]


@pytest.mark.parametrize(("step", "killed_at"), [(2, 0), (4, 0), *SLOW])
def test_a_signal_while_means_are_evaluated_loses_no_evaluation(
    tiny_mixture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    killed_at: int,
    undisturbed: Any,
) -> None:
    trainer = averaged(tiny_mixture, tmp_path)
    evaluate, log = trainer.train_module.eval_losses, trainer.log_evaluation
    signals, logged = list[None](), list[Any]()

    def signalled(batch: Any, **options: Any) -> Any:
        if trainer.step == step and not signals:
            signals.append(os.kill(os.getpid(), signal.SIGTERM))
        return evaluate(batch, **options)

    def killed(results: Any) -> None:
        logged.extend([results] * len(signals))
        if killed_at and len(logged) == killed_at:
            raise Killed
        log(results)

    monkeypatch.setattr(trainer.train_module, "eval_losses", signalled)
    monkeypatch.setattr(trainer, "log_evaluation", killed)
    with contextlib.suppress(Preempted, Killed):
        trainer.fit()
    assert (trainer.step, len(signals)) == (step, 1)
    for _ in range(2):  # the second one has nothing to do
        again = averaged(tiny_mixture, tmp_path)
        again.fit()
    assert not again.left
    assert evaluations(tmp_path) == undisturbed


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
