"""Tasks in a run: scored as a plain loop does, with errors, and compared with the time before."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.distributed import run_ranks
from support.eval_requests import make_task, one_by_one
from support.runs import build_trainer, group_world, metrics

from olm_train.evaluation.scoring import TaskScores
from olm_train.extensions.downstream.downstream_evaluator import (
    QuestionScores,
    comparable,
    last_scores,
)

TASK = "--trainer.callbacks.downstream_evaluator"
OFF = "--trainer.callbacks.lm_evaluator=null"
MINE = "downstream/mine"


def stop(steps: int) -> str:
    return f"--trainer.hard_stop={{value: {steps}, unit: steps}}"


def logged(folder: Path) -> dict[int, dict[str, float]]:
    lines = [line for line in metrics(folder) if MINE in line.get("eval", {})]
    return {line["step"]: line["eval"][MINE] for line in lines}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "mine"
    make_task(folder, tiny_tokenizer)
    return folder


def options(task: Path, *more: str) -> list[str]:
    return [OFF, f"{TASK}.tasks={{mine: {task}}}", *[f"{TASK}.{each}" for each in more]]


def test_a_run_logs_what_a_plain_loop_finds_and_how_it_changed(
    task: Path, tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(task, "eval_interval=2", "eval_on_startup=true")
    trainer = build_trainer(tiny_mixture, tmp_path, stop(4), *given)
    trainer.train_module.ensure_weights()
    callback: Any = trainer.callbacks["downstream_evaluator"]
    log_p = one_by_one(trainer.train_module.model, task, 32)
    trainer.fit()
    found = logged(tmp_path)
    assert list(found) == [0, 2, 4]
    requests = callback._tasks[MINE].eval_set.requests
    asked = requests.gold & ~requests.unconditional
    bits = -log_p[asked] / math.log(2) / requests.bytes[asked]
    scores = callback._scores[MINE]
    kept = ~np.isnan(scores.values["BPB"])
    assert found[0]["BPB"] == pytest.approx(float(np.mean(bits[kept])), rel=1e-5)
    assert found[0]["truncated"] == callback._tasks[MINE].truncated > 0
    assert "len_norm change" not in found[0]
    for step in (2, 4):
        before = found[step - 2]["len_norm"]
        assert found[step]["len_norm change"] == pytest.approx(found[step]["len_norm"] - before)
        assert found[step]["len_norm change stderr"] >= 0
    last = last_scores(tmp_path, MINE)
    assert last is not None
    assert (last.step, last.metric) == (4, "len_norm")
    assert comparable(last, scores) == pytest.approx(scores.values["len_norm"], nan_ok=True)
    said = capsys.readouterr().err
    assert "requests of downstream/mine are longer than a row of 32 tokens" in said
    assert f"evaluation at step 4   {MINE}   len_norm {found[4]['len_norm']:.4f} +- " in said


def on_ranks(lock: str, folder: str, task: str) -> None:
    given = options(Path(task), "eval_on_startup=true")
    dp = "--train_module.dp_config={name: fsdp, param_dtype: float32}"
    build_trainer(Path(lock), Path(folder), stop(1), *given, dp, world=group_world()).fit()


@pytest.mark.slow
def test_two_sharded_ranks_log_what_one_does(
    task: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    given = options(task, "eval_on_startup=true")
    build_trainer(tiny_mixture, tmp_path / "one", stop(1), *given).fit()
    run_ranks(on_ranks, 2, str(tiny_mixture), str(tmp_path / "two"), str(task))
    alone, two = logged(tmp_path / "one")[0], logged(tmp_path / "two")[0]
    assert two.keys() == alone.keys()
    for name, value in alone.items():
        assert two[name] == pytest.approx(value, rel=1e-5), name


def test_fixed_steps_come_beside_the_interval_and_the_first_may_be_the_last(
    task: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    given = options(task, "eval_interval=3", "fixed_steps=[2]", "eval_on_finish=false")
    build_trainer(tiny_mixture, tmp_path / "all", stop(4), *given).fit()
    assert list(logged(tmp_path / "all")) == [2, 3]
    given = options(task, "eval_interval=2", "cancel_after_first_eval=true")
    trainer = build_trainer(tiny_mixture, tmp_path / "one", stop(4), *given)
    trainer.fit()
    assert trainer.cancelled is not None
    assert (trainer.step, trainer.cancelled.by) == (2, "downstream_evaluator")


def test_an_evaluation_of_other_questions_is_not_compared() -> None:
    scores = TaskScores("a" * 64, "acc", {"acc": np.array([1.0, np.nan])}, {})
    kept = QuestionScores.of(scores, 7)
    assert kept.values == (1.0, None)
    same = comparable(kept, scores)
    assert same is not None
    np.testing.assert_array_equal(same, [1.0, np.nan])
    other = TaskScores("b" * 64, "acc", scores.values, {})
    assert comparable(kept, other) is None


def test_early_stopping_looks_at_held_out_loss_beside_tasks(
    task: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    given = [f"{TASK}.tasks={{mine: {task}}}", f"{TASK}.eval_interval=1"]
    given += ["--trainer.callbacks.lm_evaluator.eval_interval=1"]
    given += ["--trainer.callbacks.early_stopping={patience: 9}"]
    trainer = build_trainer(tiny_mixture, tmp_path, stop(2), *given)
    trainer.fit()
    assert trainer.cancelled is None
    assert list(logged(tmp_path)) == [1, 2]
