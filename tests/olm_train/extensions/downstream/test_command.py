"""`olm-train evaluate`: the loss of a model on datasets, as a sentence a dataset or as JSON."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.eval_requests import make_task
from support.hf_models import hf_model
from support.runs import build_trainer, metrics

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.eval_set import EvalSet
from olm_data.errors import InputError
from olm_data.storage.store import Store
from olm_train.checkpoint.portable import open_portable
from olm_train.data.batch import Batch
from olm_train.extensions.downstream import evaluation as evaluate
from olm_train.extensions.downstream.command import main
from olm_train.extensions.downstream.evaluation import EvaluationData
from olm_train.extensions.hf_export.command import main as export
from olm_train.model.decoder import Decoder


def test_the_loss_is_that_of_the_runs_own_evaluation(tiny_mixture: Path, tmp_path: Path) -> None:
    held = str(tiny_mixture.parent / "held")
    options = ["--trainer.hard_stop={value: 2, unit: steps}"]
    options += [f"--trainer.callbacks.lm_evaluator.datasets={{held: {held}}}"]
    build_trainer(tiny_mixture, tmp_path / "run", *options).fit()
    logged = next(line["eval"]["held"] for line in metrics(tmp_path / "run") if "eval" in line)
    found = CliRunner().invoke(main, [str(tmp_path / "run"), "--data", held, "--json"])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert list(result) == ["checkpoint", "step", "datasets"]
    assert (result["checkpoint"], result["step"]) == ("step00000002", 2)
    assert math.isclose(result["datasets"][held]["CE loss"], logged["CE loss"], rel_tol=1e-5)
    said = CliRunner().invoke(main, [str(tmp_path / "run"), "--data", held])
    assert said.stdout.startswith(f"{held}: CE loss {logged['CE loss']:.4f} nats a token")


@pytest.fixture(scope="module")
def run(tiny_mixture: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that was evaluated on a task and a held-out set at its end."""
    folder = tmp_path_factory.mktemp("evaluated")
    make_task(folder / "mine", tiny_tokenizer)
    task = f"--trainer.callbacks.downstream_evaluator.tasks={{mine: {folder / 'mine'}}}"
    stop = "--trainer.hard_stop={value: 2, unit: steps}"
    held = f"--trainer.callbacks.lm_evaluator.datasets={{held: {tiny_mixture.parent / 'held'}}}"
    build_trainer(tiny_mixture, folder / "run", stop, task, held).fit()
    return folder


def invoke(*words: str | Path) -> dict[str, dict[str, float]]:
    found = CliRunner().invoke(main, [*map(str, words), "--json"])
    assert found.exit_code == 0, found.output
    results: dict[str, dict[str, float]] = json.loads(found.stdout)["datasets"]
    return results


def test_data_set_text_and_task_measure_as_in_the_run_from_checkpoint_export_and_saved_weights(
    run: Path, tiny_mixture: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    logged: dict[str, dict[str, float]] = {}
    for line in metrics(run / "run"):
        logged |= line.get("eval", {})
    found = open_portable(run / "run", "latest", print)
    exporting = [str(run / "run"), "--output", str(tmp_path / "e")]
    assert CliRunner().invoke(export, exporting).exit_code == 0
    found.model().save(tmp_path / "saved", tokenizer=tiny_tokenizer)
    held = tiny_mixture.parent / "held"
    in_the_loop = {
        str(run / "mine"): logged["downstream/mine"],
        str(held): logged["held"],
        f"{held}.jsonl": logged["held"],
    }
    data = [word for place in in_the_loop for word in ("--data", place)]
    for words in (
        [run / "run"],
        [tmp_path / "e"],
        [tmp_path / "saved", "--sequence-length", "32"],
    ):
        result = invoke(*words, *data)
        assert result.keys() == in_the_loop.keys()
        for place, expected in in_the_loop.items():
            assert result[place].keys() == expected.keys(), (words, place)
            for name, value in expected.items():
                assert result[place][name] == pytest.approx(value, rel=1e-5), (words, place, name)


def test_saved_weights_need_a_length_and_data_of_their_tokenizer(
    run: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    found = open_portable(run / "run", "latest", print)
    found.model().save(tmp_path / "saved", tokenizer=tiny_tokenizer)
    words = [str(tmp_path / "saved"), "--data", str(run / "mine")]
    assert "--sequence-length" in CliRunner().invoke(main, words).output
    fewer = json.loads(tiny_tokenizer.read_text())
    last = max(fewer["model"]["vocab"], key=fewer["model"]["vocab"].get)
    del fewer["model"]["vocab"][last], fewer["model"]["merges"][-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fewer))
    make_task(tmp_path / "theirs", tmp_path / "tokenizer.json")
    words = [words[0], "--sequence-length", "32", "--data", str(tmp_path / "theirs")]
    wrong = CliRunner().invoke(main, words)
    assert wrong.exit_code == 3
    assert "made by another tokenizer than the model's" in wrong.output


def test_a_model_compared_with_itself_has_not_changed(run: Path, tiny_mixture: Path) -> None:
    task = str(run / "mine")
    result = invoke(run / "run", "--data", task, "--compare", run / "run")[task]
    assert (result["len_norm change"], result["len_norm change stderr"]) == (0.0, 0.0)
    held = str(tiny_mixture.parent / "held")
    words = [str(run / "run"), "--data", held, "--compare", str(run / "run")]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert "there is nothing to compare" in refused.output


def test_a_model_of_transformers_has_the_loss_of_a_run_that_begins_with_it(
    tiny_mixture: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    hf_model("llama", vocab_size=512, eos_token_id=0).save_pretrained(tmp_path / "llama")
    shutil.copy(tiny_tokenizer, tmp_path / "llama/tokenizer.json")
    held = tiny_mixture.parent / "held"
    build_trainer(
        tiny_mixture, tmp_path / "run", "--model=null",
        f"--trainer.load_path={tmp_path / 'llama'}",
        "--trainer.load_trainer_state=false", "--trainer.load_optim_state=false",
        "--trainer.hard_stop={value: 1, unit: steps}",
        f"--trainer.callbacks.lm_evaluator={{datasets: {{held: {held}}}, eval_on_startup: true}}",
    ).fit()  # fmt: skip
    begun = next(line["eval"]["held"] for line in metrics(tmp_path / "run") if "eval" in line)
    words = [tmp_path / "llama", "--sequence-length", "32"]
    found = invoke(*words, "--data", held, "--data", f"{held}.jsonl")
    for place in (str(held), f"{held}.jsonl"):  # the text is tokenised as the run's data were
        assert found[place] == pytest.approx(begun, rel=1e-5)
    short = [str(tmp_path / "llama"), "--data", str(held)]
    assert "--sequence-length" in CliRunner().invoke(main, short).output
    watched = CliRunner().invoke(main, [*short, "--watch"])
    assert watched.exit_code == 2
    assert "this is not a run" in watched.output
    hf_model("llama", vocab_size=100, eos_token_id=0).save_pretrained(tmp_path / "llama")
    small = CliRunner().invoke(main, [*map(str, words), "--data", str(held)])
    assert small.exit_code == 3
    assert "and the model knows 100" in small.output


def test_a_file_of_text_may_lie_in_a_store(
    run: Path, tiny_mixture: Path, s3: dict[str, str]
) -> None:
    held = f"{tiny_mixture.parent / 'held'}.jsonl"
    store = Store(f"s3://{s3['bucket']}/texts")
    store.put("held.jsonl.gz", gzip.compress(Path(held).read_bytes()))
    places = [held, f"file://{held}", store.url("held.jsonl.gz")]
    found = invoke(run / "run", *(word for place in places for word in ("--data", place)))
    assert list(found) == places
    assert found[places[0]] == found[places[1]] == found[places[2]]


def test_a_file_that_holds_no_text_is_refused_with_what_can_be_typed(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"context": "a", "choices": [" b"]}\n')
    words = [str(run / "run"), "--data", str(tmp_path / "mine.jsonl")]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 4
    assert "olm-data eval-set build" in refused.output
    assert "--text-column" not in refused.output


def test_a_few_tokens_make_few_rows(
    run: Path, tiny_mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[int, ...]]()

    def losses_of(model: Decoder) -> Callable[[Batch], torch.Tensor]:
        def by_label(batch: Batch) -> torch.Tensor:
            seen.append(tuple(batch.labels.shape))
            return torch.zeros(batch.labels.shape)

        return by_label

    monkeypatch.setattr(evaluate, "losses_of", losses_of)
    data = [str(run / "mine"), str(tiny_mixture.parent / "held")]
    found = open_portable(run / "run", "latest", print)
    EvaluationData(found, data, sequence_length=1 << 20).measure(found)
    tokens = [EvalSet.open(data[0]).info.tokens, Dataset.open(data[1]).tokens]
    assert seen == [(1, size) for size in tokens]


def test_data_that_are_not_there_and_a_dataset_for_a_model_are_said_in_these_words(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    from olm_train.checkpoint.load import find_checkpoint
    from olm_train.distributed.world import World

    with pytest.raises(InputError, match="this is a dataset, not the folder of a training run"):
        find_checkpoint(tiny_mixture.parent / "prose", World(), print)
    with pytest.raises(InputError, match=r"there is nothing at this path\n  where: .*nope\.txt"):
        EvaluationData(None, [str(tmp_path / "nope.txt")], sequence_length=8)  # type: ignore[arg-type]
