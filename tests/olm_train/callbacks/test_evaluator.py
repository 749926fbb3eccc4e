"""Held-out loss: exact, the same on any number of ranks, at the steps asked for."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, metrics

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ValidationError
from olm_data.mixture.lock import Lock
from olm_train.distributed.world import World
from olm_train.evaluation.held_out import perplexity

NAME = "--trainer.callbacks.lm_evaluator"


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line["eval"]["held"] for line in metrics(folder) if "eval" in line}


def test_result_is_the_mean_over_every_token_and_the_first_comes_after_eos(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, f"{NAME}.eval_on_startup=true", stop=1)
    trainer.train_module.ensure_weights()
    model, total, count = trainer.train_module.model, 0.0, 0
    held = Dataset.open(str(tiny_mixture.parent / "held"))
    with torch.no_grad():
        for number in range(held.documents):
            start, stop = held.document_span(number)
            # Rows cut the stream every 32 tokens: a piece sees only what is left of it in the row.
            cuts = [start, *range(start // 32 * 32 + 32, stop, 32), stop]
            for a, b in itertools.pairwise(cuts):
                eos = [held.manifest.tokenizer.eos]
                ids = torch.tensor([*(held.read(a - 1, a).tolist() if a > start else eos),
                                    *held.read(a, b).tolist()])  # fmt: skip
                logits = model(ids[None, :-1])[0]
                losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
                total, count = total + losses.double().sum().item(), count + len(losses)
    trainer.fit()
    result = evaluations(tmp_path)[0]
    assert result["tokens"] == count == held.tokens
    assert result["CE loss"] == pytest.approx(total / count, rel=1e-6)
    assert result["PPL"] == pytest.approx(math.exp(total / count), rel=1e-6)


def evaluate(lock: Path, folder: Path, microbatch: int) -> dict[int, dict[str, float]]:
    world = group_world() if dist.is_initialized() else World()
    trainer = build_trainer(
        lock,
        folder,
        f"--train_module.rank_microbatch_size={microbatch}",
        f"{NAME}.eval_on_startup=true",
        stop=1,
        world=world,
    )
    trainer.fit()
    return evaluations(folder)


@pytest.mark.slow
def test_ranks_and_micro_batches_do_not_change_the_result(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    alone = evaluate(tiny_mixture, tmp_path / "one", 256)
    small = evaluate(tiny_mixture, tmp_path / "small", 32)
    two, _ = run_ranks(evaluate, 2, tiny_mixture, tmp_path / "two", 64)
    for other in (small, two):
        assert other[0]["tokens"] == alone[0]["tokens"]
        assert other[0]["CE loss"] == pytest.approx(alone[0]["CE loss"], rel=1e-6)


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
