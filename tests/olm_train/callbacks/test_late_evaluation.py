"""A run that has ended still makes the evaluations it has not made, each once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.runs import build_trainer, metrics

from olm_train.trainer import Trainer

SETS = "--trainer.callbacks.lm_evaluator.datasets={{{}}}"


def fit(lock: Path, folder: Path, **sets: Path) -> Trainer:
    given = ", ".join(f"{name}: {path}" for name, path in sets.items())
    trainer = build_trainer(lock, folder, SETS.format(given), stop=2)
    trainer.fit()
    return trainer


def results(folder: Path) -> list[tuple[int, dict[str, float]]]:
    return [
        (line["step"], {name: found["CE loss"] for name, found in line["eval"].items()})
        for line in metrics(folder)
        if "eval" in line
    ]


def test_a_new_evaluation_set_of_a_finished_run_is_evaluated_once(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held, prose = tiny_mixture.parent / "held", tiny_mixture.parent / "prose"
    fit(tiny_mixture, tmp_path / "both", held=held, prose=prose)
    fit(tiny_mixture, tmp_path / "late", held=held)
    steps = sorted(path.name for path in (tmp_path / "late").glob("step*"))
    capsys.readouterr()
    for message in ("still to do: evaluation prose", "nothing to do", "nothing to do"):
        fit(tiny_mixture, tmp_path / "late", held=held, prose=prose)
        assert f"already finished at step 2: {message}\n" in capsys.readouterr().err
    [(_, both)] = results(tmp_path / "both")
    assert results(tmp_path / "late") == [
        (2, {"held": both["held"]}),
        (2, {"prose": both["prose"]}),
    ]
    assert sorted(path.name for path in (tmp_path / "late").glob("step*")) == steps


def test_another_data_set_under_a_name_that_was_evaluated_is_named(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_mixture.parent / "held", tmp_path / "held")
    fit(tiny_mixture, tmp_path / "run", held=tmp_path / "held")
    fit(tiny_mixture, tmp_path / "run", held=tiny_mixture.parent / "prose")
    said = capsys.readouterr().err
    assert "the evaluation held of step 2 was made on another data set" in said
    assert len(results(tmp_path / "run")) == 1
