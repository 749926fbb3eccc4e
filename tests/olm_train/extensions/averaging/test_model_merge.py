from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.runs import STEPS, build_trainer, group_world, metrics
from torch.distributed.tensor import DTensor

from olm_data.errors import ConflictError, ResourceError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manager import CheckpointManager
from olm_train.checkpoint.merged import merge_of
from olm_train.distributed.world import World
from olm_train.extensions.averaging.callbacks import ModelMergeCallback
from olm_train.extensions.averaging.weighting import Weighting, shares
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


@pytest.mark.parametrize(
    "weighting",
    ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in ("uniform", "decay"))],
)
def test_the_mean_of_the_last_steps_is_saved_at_the_end(
    tiny_mixture: Path, tmp_path: Path, weighting: Weighting
) -> None:
    recorder = Recorder()
    build_trainer(
        tiny_mixture,
        tmp_path,
        OFF,
        f"--trainer.callbacks.model_merge={{merge_last_n_steps: 7, weights: {weighting}}}",
        callbacks={"recorder": recorder},
    ).fit()
    seen = [recorder.weights[step] for step in range(STEPS - 6, STEPS + 1)]
    folder = tmp_path / f"step{STEPS:08d}-merged"
    assert_mean(folder, seen, weighting)
    merge = merge_of(open_checkpoint(folder, World()))
    assert merge is not None
    assert (merge.weights, merge.first, merge.last, merge.count) == (weighting, 18, 24, 7)
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


@pytest.mark.slow
def test_what_olm_train_evaluate_finds_is_what_the_log_says(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    from olm_train.checkpoint.portable import open_portable
    from olm_train.extensions.downstream.evaluation import EvaluationData

    trainer_with(tiny_mixture, tmp_path, merge_last_n_steps=5).fit()
    held = str(tiny_mixture.parent / "held")
    found = open_portable(tmp_path, "step00000024-merged", print)
    result = EvaluationData(found, (held,)).measure(found).datasets[held]
    logged = next(x["eval"] for x in metrics(tmp_path) if "merged/held" in x.get("eval", {}))
    assert result["CE loss"] == pytest.approx(logged["merged/held"]["CE loss"], rel=1e-6)


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
@pytest.mark.parametrize(
    "kills", [(6,), pytest.param((4, 5, 6, 7, 8), marks=pytest.mark.slow)], ids=["one", "each"]
)
def test_killed_in_steps_of_the_window_two_ranks_get_the_same_bits(
    tiny_mixture: Path, tmp_path: Path, kills: tuple[int, ...]
) -> None:
    end, lock = 8, str(tiny_mixture)
    whole = run_ranks(merge_ranks, 2, lock, str(tmp_path / "whole"), None, end)[0]
    wanted = saved(tmp_path / "whole" / f"step{end:08d}-merged")
    assert_mean(tmp_path / "whole" / f"step{end:08d}-merged", [whole[n] for n in range(4, 9)],
                "uniform")  # fmt: skip
    for kill in kills:  # each run repeats a step and goes one further
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


def test_a_resume_without_the_callback_says_that_its_tensors_are_not_used(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        trainer_with(
            tiny_mixture, tmp_path, OFF, OFTEN, recorder=Recorder(22), merge_last_n_steps=5
        ).fit()
    trainer_with(tiny_mixture, tmp_path, OFF).fit()
    said = capsys.readouterr().err
    assert "tensors that the callback model_merge kept in the checkpoint are not used" in said
    assert not list(tmp_path.glob("*-merged"))


def test_a_window_that_no_longer_fits_is_dropped_with_a_word(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        trainer_with(
            tiny_mixture, tmp_path, OFF, OFTEN, recorder=Recorder(22), merge_last_n_steps=5
        ).fit()
    options: dict[str, Any] = {"merge_last_n_steps": 5, "weights": "linear"}
    trainer_with(tiny_mixture, tmp_path, OFF, **options).fit()
    said = capsys.readouterr().err
    assert "begun is dropped: its weights are uniform, and now linear" in said
    assert "the merge of step 24 is of 3 steps, not 5" in said
    merge = merge_of(open_checkpoint(tmp_path / "step00000024-merged", World()))
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


def test_another_merge_in_its_place_is_not_replaced(tiny_mixture: Path, tmp_path: Path) -> None:
    stop = "--trainer.hard_stop={value: 3, unit: steps}"
    trainer_with(tiny_mixture, tmp_path, OFF, stop, merge_last_n_steps=2).fit()
    (tmp_path / "step00000003").rename(tmp_path / "elsewhere")
    (tmp_path / "latest").unlink()
    with pytest.raises(ConflictError, match="another checkpoint is there already"):
        trainer_with(tiny_mixture, tmp_path, OFF, stop, merge_last_n_steps=3).fit()


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
