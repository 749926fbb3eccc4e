"""What evaluators share: a run that has ended still makes what is new, each once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.eval_requests import make_task
from support.runs import build_trainer, metrics

from olm_train.trainer import Trainer


def fit(lock: Path, folder: Path, tasks: dict[str, Path] | None = None, **sets: Path) -> Trainer:
    def given(option: str, places: dict[str, Path]) -> str:
        named = ", ".join(f"{name}: {path}" for name, path in places.items())
        return f"--trainer.callbacks.{option}={{{named}}}"

    options = [given("lm_evaluator.datasets", sets)]
    options += [given("downstream_evaluator.tasks", tasks)] if tasks else []
    trainer = build_trainer(lock, folder, *options, stop=2)
    trainer.fit()
    return trainer


def results(folder: Path) -> list[tuple[int, str, float | None]]:
    return [
        (line["step"], name, found.get("CE loss"))
        for line in metrics(folder)
        for name, found in line.get("eval", {}).items()
    ]


def test_new_sets_and_tasks_of_a_finished_run_are_evaluated_once_and_nothing_else(
    tiny_mixture: Path, tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        make_task(tmp_path / name, tiny_tokenizer)
    held, prose = tiny_mixture.parent / "held", tiny_mixture.parent / "prose"
    first = {"first": tmp_path / "first"}
    both = first | {"second": tmp_path / "second"}
    late = tmp_path / "late"
    fit(tiny_mixture, tmp_path / "both", both, held=held, prose=prose)
    fit(tiny_mixture, late, first, held=held)
    steps = sorted(path.name for path in late.glob("step*"))
    capsys.readouterr()
    for tasks, message in (
        (first, "still to do: evaluation prose"),
        (first, "nothing to do"),
        (both, "still to do: evaluation downstream/second"),
        (both, "nothing to do"),
    ):
        fit(tiny_mixture, late, tasks, held=held, prose=prose)
        assert f"already finished at step 2: {message}\n" in capsys.readouterr().err
    assert [name for _, name, _ in results(late)[-2:]] == ["prose", "downstream/second"]
    assert sorted(results(late), key=str) == sorted(results(tmp_path / "both"), key=str)
    assert sorted(path.name for path in late.glob("step*")) == steps


def test_another_data_set_under_a_name_that_was_evaluated_is_named(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_mixture.parent / "held", tmp_path / "held")
    fit(tiny_mixture, tmp_path / "run", held=tmp_path / "held")
    fit(tiny_mixture, tmp_path / "run", held=tiny_mixture.parent / "prose")
    said = capsys.readouterr().err
    assert "the evaluation held of step 2 was made on another data set" in said
    assert len(results(tmp_path / "run")) == 1
