from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.runs import STEPS, build_trainer, group_world, metrics, one_step_trainer
from torch.distributed.tensor import DTensor

from olm_data.errors import ResourceError, UsageError
from olm_train.callbacks.base import Callback
from olm_train.callbacks.early_stopping import EarlyStoppingCallback
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manager import CheckpointManager
from olm_train.checkpoint.merged import merge_of
from olm_train.distributed.preempt import Preempted
from olm_train.distributed.world import World
from olm_train.extensions.averaging.callbacks import (
    EMACallback,
    ModelMergeCallback,
    in_place_of_weights,
    weights_of,
)
from olm_train.extensions.averaging.weighting import RunningMean, Weighting, shares
from olm_train.stability.report import NonFiniteError
from olm_train.trainer import Trainer

OFF = "--trainer.callbacks.lm_evaluator.enabled=false"
OFTEN = "--trainer.callbacks.checkpointer={save_interval: 50, ephemeral_save_interval: 1}"


class Killed(BaseException):
    """Stands for the end of the process: nothing in the trainer expects it."""


class Recorder(Callback):
    """Keeps the whole weights after each step; ends the run after one of them."""

    priority = 100

    def __init__(self, kill: int | None = None) -> None:
        self.kill = kill
        self.weights: dict[int, dict[str, np.ndarray]] = {}

    def post_step(self) -> None:
        state = self.trainer.train_module.state_dict()["model"]
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
        self.weights[self.trainer.step] = {n: t.numpy().copy() for n, t in whole.items()}
        if self.trainer.step == self.kill:
            raise Killed


def saved(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a merged checkpoint, by parameter; it holds nothing else."""
    checkpoint = open_checkpoint(folder, World())
    assert not checkpoint.names("optim")
    assert not checkpoint.names("callbacks")
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.torch_dtype)
        for name, entry in checkpoint.index.tensors.items()
    }
    checkpoint.load_tensors(tensors, World())
    return {name.removeprefix("model."): tensor.numpy() for name, tensor in tensors.items()}


def assert_mean(folder: Path, seen: list[dict[str, np.ndarray]], weighting: Weighting) -> None:
    got = saved(folder)
    assert got.keys() == seen[0].keys()
    for name, tensor in got.items():
        exact = np.stack([each[name].astype(np.float64) for each in seen])
        wanted = np.tensordot(np.array(shares(weighting, len(seen))), exact, axes=1)
        # rounded once to fp32, and each of the updates in fp64 loses 2^-48 of what it adds up
        rounding = np.spacing(np.abs(wanted).astype(np.float32)) / 2
        updates = len(seen) * 2.0**-48 * np.abs(exact).max(0)
        assert (np.abs(tensor - wanted) <= rounding + updates).all(), name


def trainer_with(
    lock: Path, folder: Path, *given: str, recorder: Recorder | None = None, **options: Any
) -> Trainer:
    callbacks: dict[str, Callback] = {} if recorder is None else {"recorder": recorder}
    if options:
        callbacks["model_merge"] = ModelMergeCallback(**options)
    return build_trainer(lock, folder, *given, callbacks=callbacks)


def test_the_mean_of_the_last_steps_is_saved_at_the_end(tiny_mixture: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    build_trainer(
        tiny_mixture,
        tmp_path,
        OFF,
        "--trainer.callbacks.model_merge={merge_last_n_steps: 7, weights: linear}",
        callbacks={"recorder": recorder},
    ).fit()
    seen = [recorder.weights[step] for step in range(STEPS - 6, STEPS + 1)]
    folder = tmp_path / f"step{STEPS:08d}-merged"
    assert_mean(folder, seen, "linear")
    merge = merge_of(open_checkpoint(folder, World()))
    assert merge is not None
    assert (merge.weights, merge.first, merge.last, merge.count) == ("linear", 18, 24, 7)
    assert (tmp_path / "latest").read_text() == f"step{STEPS:08d}\n"


def test_merges_at_steps_and_intervals_with_windows_that_overlap(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"merge_step": [5, 99], "merge_interval": 9}
    trainer = trainer_with(
        tiny_mixture,
        tmp_path,
        OFF,
        recorder=recorder,
        merge_last_n_steps=12,
        output_suffix="mean",
        **options,
    )
    trainer.fit()
    folders = sorted(path.name for path in tmp_path.glob("step*-*"))
    assert folders == ["step00000005-mean", "step00000009-mean", "step00000018-mean"]
    for end, first in ((5, 1), (9, 1), (18, 7)):
        seen = [recorder.weights[step] for step in range(first, end + 1)]
        assert_mean(tmp_path / f"step{end:08d}-mean", seen, "uniform")
    said = capsys.readouterr().err
    assert "the merge of step 5 is of 5 steps, not 12: it begins with step 1" in said
    assert "model_merge.merge_step: the run ends at step 24, before step 99" in said


def test_merged_weights_are_evaluated(tiny_mixture: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"merge_interval": 4, "merge_last_n_steps": 3}
    trainer_with(tiny_mixture, tmp_path, **options).fit()
    lines = metrics(tmp_path)
    merged = [x for x in lines if any(name.startswith("merged/") for name in x.get("eval", {}))]
    assert [line["step"] for line in merged] == [4, 8, 12, 16, 20, 24]
    own = next(x for x in lines if x["step"] == 24 and "held" in x.get("eval", {}))
    result = merged[-1]["eval"]["merged/held"]
    assert result.keys() == own["eval"]["held"].keys()
    assert result["CE loss"] != own["eval"]["held"]["CE loss"]


def merge_ranks(lock: str, folder: str, kill: int | None, end: int) -> dict[int, Any]:
    """A run of sharded weights with a merge of the last five steps, in each rank."""
    recorder = Recorder(kill)
    trainer = build_trainer(
        Path(lock),
        Path(folder),
        OFF,
        OFTEN,
        "--train_module.dp_config={name: fsdp, param_dtype: float32}",
        f"--trainer.hard_stop={{value: {end}, unit: steps}}",
        callbacks={"recorder": recorder, "model_merge": ModelMergeCallback(merge_last_n_steps=5)},
        world=group_world(),
    )
    try:
        trainer.fit()
    except Killed:
        return {}
    sharded = [type(t).__name__ for t in trainer.train_module.state_dict()["model"].values()]
    assert set(sharded) == {"DTensor"}
    return recorder.weights


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].tobytes() == other[name].tobytes() for name in one
    )


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_killed_in_steps_of_the_window_two_ranks_get_the_same_bits(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    end, lock = 8, str(tiny_mixture)
    whole = run_ranks(merge_ranks, 2, lock, str(tmp_path / "whole"), None, end)[0]
    wanted = saved(tmp_path / "whole" / f"step{end:08d}-merged")
    assert_mean(tmp_path / "whole" / f"step{end:08d}-merged", [whole[n] for n in range(4, 9)],
                "uniform")  # fmt: skip
    for kill in range(4, 9):  # each run repeats a step and goes one further
        run_ranks(merge_ranks, 2, lock, str(tmp_path / "killed"), kill, end)
    run_ranks(merge_ranks, 2, lock, str(tmp_path / "killed"), None, end)
    assert same(saved(tmp_path / "killed" / f"step{end:08d}-merged"), wanted)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_window_goes_on_with_another_number_of_ranks(tiny_mixture: Path, tmp_path: Path) -> None:
    run_ranks(merge_ranks, 2, str(tiny_mixture), str(tmp_path), 7, 9)
    recorder = Recorder()
    stop = "--trainer.hard_stop={value: 9, unit: steps}"
    trainer_with(tiny_mixture, tmp_path, OFF, stop, recorder=recorder, merge_last_n_steps=5).fit()
    merge = merge_of(open_checkpoint(tmp_path / "step00000009-merged", World()))
    assert merge is not None
    assert (merge.first, merge.count) == (5, 5)
    seen = [recorder.weights[step] for step in (7, 8, 9)]
    part = saved(tmp_path / "step00000009-merged")
    for name in part:  # 5 and 6 were trained on two ranks: the same weights but for rounding
        assert np.allclose(part[name], np.mean([w[name] for w in seen], 0), atol=0.02)


def test_a_window_that_no_longer_fits_is_dropped_with_a_word(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(Killed):
        trainer_with(
            tiny_mixture, run, OFF, OFTEN, recorder=Recorder(22), merge_last_n_steps=5
        ).fit()
    without = shutil.copytree(run, tmp_path / "without")
    trainer_with(tiny_mixture, without, OFF).fit()
    said = capsys.readouterr().err
    assert "tensors that the callback model_merge kept in the checkpoint are not used" in said
    assert not list(without.glob("*-merged"))
    options: dict[str, Any] = {"merge_last_n_steps": 5, "weights": "linear"}
    trainer_with(tiny_mixture, run, OFF, **options).fit()
    said = capsys.readouterr().err
    assert "begun is dropped: its weights are uniform, and now linear" in said
    assert "the merge of step 24 is of 3 steps, not 5" in said
    merge = merge_of(open_checkpoint(run / "step00000024-merged", World()))
    assert merge is not None
    assert (merge.weights, merge.first, merge.count) == ("linear", 22, 3)


def test_a_merge_that_could_not_be_written_is_made_later(
    tiny_mixture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = CheckpointManager.save_merged
    tries: list[int] = []

    def full(manager: CheckpointManager, *given: Any) -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ResourceError("the disk is full")
        return whole(manager, *given)

    monkeypatch.setattr(CheckpointManager, "save_merged", full)
    recorder = Recorder()
    given = {"merge_step": [7], "merge_last_n_steps": 3}
    trainer_with(tiny_mixture, tmp_path, OFF, recorder=recorder, **given).fit()
    assert "the merge is tried again" in capsys.readouterr().err
    assert len(tries) == 3
    seen = [recorder.weights[step] for step in (5, 6, 7)]
    assert_mean(tmp_path / "step00000007-merged", seen, "uniform")


def test_a_run_that_ended_without_its_merge_makes_it_when_it_is_started_again(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> str:
        raise ResourceError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save_merged", full)
        recorder = Recorder()
        with pytest.raises(ResourceError):
            trainer_with(tiny_mixture, tmp_path, OFF, recorder=recorder, merge_last_n_steps=3).fit()
    trainer_with(tiny_mixture, tmp_path, OFF, merge_last_n_steps=3).fit()
    seen = [recorder.weights[step] for step in (22, 23, 24)]
    assert_mean(tmp_path / "step00000024-merged", seen, "uniform")


def test_a_hard_stop_in_a_window_leaves_the_later_merge_as_it_would_be(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"merge_step": [6], "merge_last_n_steps": 4}
    end = "--trainer.max_duration={value: 7, unit: steps}"
    recorder = Recorder()
    trainer_with(tiny_mixture, tmp_path / "whole", OFF, end, recorder=recorder, **options).fit()
    stop = "--trainer.hard_stop={value: 5, unit: steps}"
    trainer_with(tiny_mixture, tmp_path / "cut", OFF, end, stop, **options).fit()
    assert not list((tmp_path / "cut").glob("*-merged"))
    assert "what was averaged lies in its last checkpoint" in capsys.readouterr().err
    trainer_with(tiny_mixture, tmp_path / "cut", OFF, end, **options).fit()
    one, other = (saved(tmp_path / run / "step00000006-merged") for run in ("whole", "cut"))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


STOP = "--trainer.hard_stop={value: 12, unit: steps}"


def assert_average(folder: Path, seen: list[dict[str, np.ndarray]], decay: float) -> None:
    for name, got in saved(folder).items():
        wanted = seen[0][name].astype(float)
        for each in seen[1:]:
            wanted = decay * wanted + (1 - decay) * each[name]
        unit = np.spacing(np.max([np.abs(w[name]) for w in seen], 0).astype(np.float32))
        # each step rounds by a unit at most, and later ones shrink that by the decay
        assert (np.abs(got - wanted) <= unit / (1 - decay)).all(), name


def averaging(
    lock: Path, folder: Path, *given: str, recorder: Recorder | None = None, **options: Any
) -> Trainer:
    callbacks = {"ema": EMACallback(**options), "recorder": recorder or Recorder()}
    return build_trainer(lock, folder, STOP, *given, callbacks=callbacks)


def test_the_average_is_that_of_float64_at_intervals_and_at_the_end(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    recorder = Recorder()
    build_trainer(
        tiny_mixture,
        tmp_path,
        STOP,
        "--trainer.callbacks.ema={decay: 0.8, start_step: 2, save_interval: 5}",
        callbacks={"recorder": recorder},
    ).fit()
    assert [p.name[4:] for p in sorted(tmp_path.glob("*-ema"))] == [
        "00000005-ema",
        "00000010-ema",
        "00000012-ema",
    ]
    for end in (5, 10, 12):
        seen = [recorder.weights[step] for step in range(3, end + 1)]
        assert_average(tmp_path / f"step{end:08d}-ema", seen, 0.8)
    merge = merge_of(open_checkpoint(tmp_path / "step00000012-ema", World()))
    assert merge is not None
    assert (merge.weights, merge.decay, merge.first, merge.count) == ("ema", 0.8, 3, 10)
    evaluated = [x["step"] for x in metrics(tmp_path) if "merged/ema/held" in x.get("eval", {})]
    assert evaluated == [5, 10, 12]


@pytest.mark.slow
def test_killed_and_gone_on_with_the_average_has_the_same_bits_and_training_too(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"decay": 0.9, "output_suffix": "smooth"}
    averaging(tiny_mixture, tmp_path / "whole", OFTEN, **options).fit()
    with pytest.raises(Killed):
        averaging(tiny_mixture, tmp_path / "killed", OFTEN, recorder=Recorder(7), **options).fit()
    averaging(tiny_mixture, tmp_path / "killed", OFTEN, **options).fit()
    one, other = (saved(tmp_path / run / "step00000012-smooth") for run in ("whole", "killed"))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    build_trainer(tiny_mixture, tmp_path / "without", STOP, OFTEN).fit()
    lines = [
        x for x in metrics(tmp_path / "killed") if "merged/smooth/held" not in x.get("eval", {})
    ]
    assert lines == metrics(tmp_path / "without")


def test_an_average_that_begins_late_or_anew_says_so(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        build_trainer(
            tiny_mixture, tmp_path, STOP, OFTEN, callbacks={"recorder": Recorder(6)}
        ).fit()
    averaging(tiny_mixture, tmp_path).fit()
    assert "note: the average of the weights begins with step 6" in capsys.readouterr().err


def test_an_average_that_could_not_be_written_is_not_promised_for_later(
    tiny_mixture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = CheckpointManager.save_merged

    def full(manager: CheckpointManager, weights: Any, merge: Any, suffix: str) -> str:
        if merge.last == 5:
            raise ResourceError("the disk is full")
        return whole(manager, weights, merge, suffix)

    monkeypatch.setattr(CheckpointManager, "save_merged", full)
    averaging(tiny_mixture, tmp_path, OFTEN, decay=0.8, save_interval=5).fit()
    assert "training goes on; no average of step 5 is saved" in capsys.readouterr().err
    assert [p.name for p in sorted(tmp_path.glob("*-ema"))] == [
        "step00000010-ema",
        "step00000012-ema",
    ]


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
