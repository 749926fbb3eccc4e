"""What evaluators share: a run that ended makes what is new, and once."""

from __future__ import annotations

from pathlib import Path

from support.eval_requests import make_task
from support.runs import build_trainer, metrics

TASKS = "--trainer.callbacks.downstream_evaluator.tasks"


def made(folder: Path) -> list[tuple[int, str]]:
    lines = [line for line in metrics(folder) if "eval" in line]
    return [(line["step"], name) for line in lines for name in line["eval"]]


def test_a_task_that_is_added_to_a_run_that_ended_is_made_and_nothing_else(
    tiny_mixture: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    for name in ("first", "second"):
        make_task(tmp_path / name, tiny_tokenizer)
    run, one = tmp_path / "run", f"{TASKS}={{first: {tmp_path / 'first'}}}"
    build_trainer(tiny_mixture, run, one, stop=2).fit()
    before = made(run)
    assert sorted(before) == [(2, "downstream/first"), (2, "held")]
    build_trainer(tiny_mixture, run, one, stop=2).fit()
    assert made(run) == before
    both = f"{TASKS}={{first: {tmp_path / 'first'}, second: {tmp_path / 'second'}}}"
    build_trainer(tiny_mixture, run, both, stop=2).fit()
    assert made(run) == [*before, (2, "downstream/second")]
