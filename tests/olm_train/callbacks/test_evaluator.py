"""Held-out loss at the steps asked for; what it is: evaluation/test_held_out.py."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.runs import build_trainer, metrics

from olm_data.errors import ValidationError
from olm_data.mixture.lock import Lock
from olm_train.evaluation.held_out import perplexity

NAME = "--trainer.callbacks.lm_evaluator"


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line["eval"]["held"] for line in metrics(folder) if "eval" in line}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (("eval_interval=3", "eval_on_finish=false"), [3, 6]),
        (("eval_interval=3", "eval_on_finish=true"), [3, 6, 7]),
        (("eval_interval=7", "eval_on_startup=true"), [0, 7]),
        (("enabled=false",), []),
    ],
)
def test_it_runs_at_the_steps_asked_for(
    tiny_mixture: Path, tmp_path: Path, options: tuple[str, ...], steps: list[int]
) -> None:
    build_trainer(tiny_mixture, tmp_path, *[f"{NAME}.{option}" for option in options], stop=7).fit()
    assert list(evaluations(tmp_path)) == steps


def test_max_batches_bounds_the_work(tiny_mixture: Path, tmp_path: Path) -> None:
    build_trainer(tiny_mixture, tmp_path, f"{NAME}.max_batches=2", stop=1).fit()
    assert 0 < evaluations(tmp_path)[1]["tokens"] <= 256


def test_a_set_of_another_tokenizer_is_refused(
    tiny_mixture: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    from support.tokenizing import make_dataset, write_jsonl

    other = tmp_path / "tokenizer.json"
    other.write_text(tiny_tokenizer.read_text().replace("<|endoftext|>", "<|end|>"))
    text = write_jsonl(tmp_path / "text.jsonl", ["some text", "more"])
    make_dataset([text], other, tmp_path / "held", eos="<|end|>")
    trainer = build_trainer(
        tiny_mixture, tmp_path / "run", f"{NAME}.datasets={{held: {tmp_path / 'held'}}}"
    )
    with pytest.raises(ValidationError, match="made by another tokenizer"):
        trainer.fit()


def test_a_set_that_is_trained_on_is_said_at_the_start(
    tiny_mixture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lock = Lock.read(tiny_mixture)
    name = lock.sources[0].name
    for folder, said in ((str(tiny_mixture.parent / "held"), 0), (lock.location(name), 1)):
        sets = f"{NAME}.datasets={{x: {folder}}}"
        build_trainer(tiny_mixture, tmp_path / str(said), sets, stop=1).fit()
        assert capfd.readouterr().err.count(f"'x' are in source {name!r}, too") == said


def test_perplexity_never_overflows() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1000.0) == math.inf


def test_fixed_steps_come_beside_the_interval_and_the_first_may_be_the_last(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    prefix = "--trainer.callbacks.lm_evaluator"
    stop = "--trainer.hard_stop={value: 7, unit: steps}"
    given = (stop, f"{prefix}.fixed_steps=[2, 5]", f"{prefix}.eval_interval=3")
    build_trainer(tiny_mixture, tmp_path / "all", *given).fit()
    looked = [line["step"] for line in metrics(tmp_path / "all") if "eval" in line]
    assert looked == [2, 3, 5, 6, 7]
    trainer = build_trainer(
        tiny_mixture, tmp_path / "one", *given, f"{prefix}.cancel_after_first_eval=true"
    )
    trainer.fit()
    assert (trainer.step, trainer.cancelled.by) == (2, "lm_evaluator")
