"""Evaluations of a run: at which steps, once each, broken off by a signal, and what they stop."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.distributed import run_ranks
from support.eval_requests import make_task
from support.evaluated_ranks import PROMPTS, evaluated, texts
from support.forked import python
from support.ports import free_port
from support.runs import REPOSITORY, build_trainer, environment, metrics, steps_of
from support.tokenizing import make_dataset, write_jsonl

from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.run_log.run_folder import SAMPLES, read_samples
from olm_train.callbacks.early_stopping import EarlyStoppingCallback
from olm_train.evaluation.held_out import perplexity
from olm_train.extensions.downstream.tasks import TaskRequests
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
    stop = "--trainer.hard_stop={value: 7, unit: steps}"
    given = (stop, f"{NAME}.fixed_steps=[2, 5]", f"{NAME}.eval_interval=3")
    build_trainer(tiny_mixture, tmp_path / "all", *given).fit()
    looked = [line["step"] for line in metrics(tmp_path / "all") if "eval" in line]
    assert looked == [2, 3, 5, 6, 7]
    trainer = build_trainer(
        tiny_mixture, tmp_path / "one", *given, f"{NAME}.cancel_after_first_eval=true"
    )
    trainer.fit()
    assert (trainer.step, trainer.cancelled.by) == (2, "lm_evaluator")


class Asked:
    """Takes what a callback asks for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cancel_run(self, reason: str, *, by: str) -> None:
        assert by == "early_stopping"
        self.asked.append(reason)


def stops_at(values: list[float], *, cut: int = 0, **options: Any) -> int | None:
    """Return the evaluation, from 0, at which the run is cancelled; `cut`: resumed before that."""
    callback = EarlyStoppingCallback(**options)
    callback.trainer = trainer = Asked()  # type: ignore[assignment]
    for number, value in enumerate(values):
        if number == cut:
            state = json.loads(json.dumps(callback.state_dict()))
            callback = EarlyStoppingCallback(**options)
            callback.load_state_dict(state)
            callback.trainer = trainer  # type: ignore[assignment]
        results = {"web": {"CE loss": value, "acc": -value}, "code": {"CE loss": 1.0, "acc": 0.0}}
        callback.log_evaluation(100 * number, results)
        if trainer.asked:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "options", "at"),
    [
        ([5, 4, 3, 3, 3], {"patience": 2}, 4),
        ([5, 4, 3, 3, 2, 2, 2], {"patience": 2}, 6),  # a better one begins anew
        ([5, 4, 3, 2, 1], {"patience": 1}, None),
        ([5, 4.9, 4.8, 4.7], {"patience": 2, "min_delta": 1.0}, 2),
        ([5, 4, 3], {"patience": 2, "metric": "acc"}, 2),
        ([5, 4, 3], {"patience": 2, "metric": "acc", "mode": "max"}, None),
        ([5, 4, 3], {"patience": 2, "dataset": "code"}, 2),
        ([5, math.nan, math.nan], {"patience": 2}, 2),
        ([math.nan, 5, 4], {"patience": 1}, None),
        ([1, 2, 3, 4, 5, 6], {}, 5),  # patience 5
    ],
)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_it_stops_after_so_many_evaluations_without_a_better_one(
    values: list[float], options: dict[str, Any], at: int | None, cut: int
) -> None:
    assert stops_at(values, cut=cut, **options) == at


def test_data_sets_that_were_not_looked_at_count_for_nothing() -> None:
    assert stops_at([1, 2, 3, 4], patience=1, dataset="another") is None


def test_a_metric_that_no_evaluation_has_is_an_error() -> None:
    with pytest.raises(UsageError, match="has no 'accuracy', but CE loss, acc"):
        stops_at([1.0], metric="accuracy")


def test_a_run_ends_early_and_says_why(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["patience=1", "min_delta=100.0"]
    given = [f"--trainer.callbacks.early_stopping.{option}" for option in options]
    trainer = build_trainer(tiny_mixture, tmp_path, *given)
    trainer.fit()
    steps = [line["step"] for line in steps_of(tmp_path)]
    assert steps == [*range(1, 19)]  # evaluations after 9 and 18
    assert "cancelled at step 18 by early_stopping (CE loss has not been" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["lm_evaluator.enabled=false", "early_stopping.patience=1"], "evaluates a data set"),
        (["early_stopping.dataset=heldd"], "evaluates heldd"),
        (["early_stopping.dataset=merged/ema/held"], "evaluates merged/ema/held"),
    ],
)
def test_one_that_no_evaluation_could_stop_is_refused(
    tiny_mixture: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    given = [f"--trainer.callbacks.{option}" for option in options]
    trainer = build_trainer(tiny_mixture, tmp_path, *given)
    with pytest.raises(UsageError, match=said):
        trainer.fit()
    assert trainer.step == 0


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "mine"
    rows = TaskRequests(make_task(folder, tiny_tokenizer), 32, 64).rows
    assert rows % 4  # two ranks take two rows at a time: the last batches are not full
    return folder


def left(folder: Path) -> list[Any]:
    """What a run leaves of its steps and evaluations, without times."""
    questions = sorted((folder / "evaluations").rglob("*.json"))
    samples = [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]
    return [
        metrics(folder),
        {str(path.relative_to(folder)): path.read_bytes() for path in questions},
        [{**each, "time": 0} for each in samples],
    ]


@pytest.fixture(scope="module")
def undisturbed(
    task: Path, tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_ranks(evaluated, 2, str(tiny_mixture), str(folder), str(task))[0][0] == "done"
    found = left(folder)
    made = [(line["step"], *line["eval"]) for line in found[0] if "eval" in line]
    assert sorted(made) == [(step, name) for step in (2, 4) for name in ("downstream/mine", "held")]
    assert list(found[1]) == [f"evaluations/downstream/mine/step0000000{n}.json" for n in (2, 4)]
    assert [each["step"] for each in found[2]] == [2, 4]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["held", "task"])
def test_a_signal_to_one_rank_stops_all_and_the_evaluation_is_made_after_the_restart(
    task: Path, tiny_mixture: Path, tmp_path: Path, undisturbed: list[Any], kind: str
) -> None:
    words = (str(tiny_mixture), str(tmp_path), str(task))
    stopped = run_ranks(evaluated, 2, *words, kind, int(signal.SIGTERM))
    assert stopped == [["stopped", 2, 75]] * 2
    made = [name for line in metrics(tmp_path) for name in line.get("eval", {})]
    assert made == (["held"] if kind == "task" else [])
    assert run_ranks(evaluated, 2, *words) == [["done", 4, 0]] * 2
    assert left(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_other_one_and_nothing_is_lost(
    task: Path, tiny_mixture: Path, tmp_path: Path, undisturbed: list[Any]
) -> None:
    paths = [str(REPOSITORY), str(REPOSITORY / "tests")]
    shared = {
        **environment(), "PYTHONPATH": os.pathsep.join(paths), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    script = str(REPOSITORY / "tests" / "support" / "evaluated_ranks.py")
    words = [str(tiny_mixture), str(tmp_path), str(task)]
    ranks = [
        subprocess.Popen(
            [python(), script, *words, "task"],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]  # nobody ends the other one
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, -signal.SIGKILL)
    assert run_ranks(evaluated, 2, *words) == [["done", 4, 0]] * 2
    assert left(tmp_path) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "ranks"), [(0.0, (1, 4)), (1.3, (1, 2))])
def test_texts_do_not_depend_on_the_number_of_ranks(
    tiny_mixture: Path, tmp_path: Path, temperature: float, ranks: tuple[int, int]
) -> None:
    found = []
    for count in ranks:
        folder = tmp_path / str(count)
        run_ranks(texts, count, str(tiny_mixture), str(folder), temperature)
        (samples,) = read_samples(folder)
        found.append([(each.prompt, each.text, each.finish) for each in samples.texts])
    assert [prompt for prompt, *_ in found[0]] == PROMPTS
    assert found[0] == found[1]
