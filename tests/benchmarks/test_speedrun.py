"""`benchmarks/speedrun.py`: what it counts is exact, and each contestant trains, at tiny sizes."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import olm_data
from olm_data.dataset.dataset import Dataset


@pytest.fixture
def speedrun(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("speedrun")


@pytest.fixture
def data(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    """A folder as the quickstart's `out`, of short texts with letters beyond ASCII."""
    for name in ("code", "docs"):
        records = [{"text": f"{name} {n} naïve “text” {'and so on ' * (n % 5)}"} for n in range(80)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        olm_data.tokenize(
            path, tokenizer=tiny_tokenizer, output=tmp_path / "out/tokens" / name,
            holdout=0.2, workers=1,
        )  # fmt: skip
    (tmp_path / "out/tokenizer.json").write_bytes(tiny_tokenizer.read_bytes())
    return tmp_path / "out"


def test_the_sources_are_the_quickstarts_and_characters_are_the_text_that_was_tokenised(
    speedrun: Any, data: Path
) -> None:
    code, docs = speedrun.quickstart_sources(data)
    assert [(code.name, code.share), (docs.name, docs.share)] == [("code", 0.8), ("docs", 0.2)]
    texts = [document.text for document in Dataset.open(str(code.held_out))]
    assert code.held_out_texts == texts
    assert code.held_out_bytes == sum(len(text.encode()) for text in texts)
    text = speedrun.plain_gpt.Text(speedrun.plain_gpt.CPU, [code, docs])
    points = np.unique([*map(ord, code.text + docs.text + "".join(texts + docs.held_out_texts))])
    assert text.vocabulary == len(points)
    assert "".join(chr(points[n]) for n in text.held_out[0][0]) == texts[0]


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary_for_every_label(
    speedrun: Any,
) -> None:
    text = importlib.import_module("speedruns.text")
    documents = [np.arange(n) % 8 for n in (1, 2, 9, 23)]
    labels = sum(len(document) - 1 for document in documents)
    rows = list(text.held_out_rows(documents, 4))
    assert sum(len(inputs) for inputs, _ in rows) == labels
    assert max(len(inputs) for inputs, _ in rows) == 4
    bits = text.bits_per_byte(lambda ids: torch.zeros(*ids.shape, 8), documents, 100, 4)
    assert bits == pytest.approx(3 * labels / 100)


def test_windows_follow_the_shares_and_labels_are_the_next_ids(speedrun: Any) -> None:
    text = importlib.import_module("speedruns.text")
    streams = [np.arange(1000), 5000 + np.arange(50)]
    inputs, labels = text.Windows(streams, [0.8, 0.2], 8, seed=1).draw(2000)
    assert torch.equal(labels, inputs + 1)
    assert float((inputs[:, 0] >= 5000).float().mean()) == pytest.approx(0.2, abs=0.04)


def test_steps_fit_the_budget_and_the_schedule_ends_with_them(speedrun: Any) -> None:
    budget = importlib.import_module("speedruns.budget")
    wall = budget.Budget(seconds=10, cores=2)
    assert wall.steps([9.0, 9.0, 9.0, 0.5, 0.5, 4.0]) == 20
    assert replace(wall, processors=True).steps([9.0, 9.0, 9.0, 0.5, 0.5, 0.5]) == 40
    assert budget.evaluated_steps(10, 1) == {10}
    assert budget.evaluated_steps(10, 4) == {2, 5, 8, 10}
    recipe = speedrun.plain_gpt.CPU
    rates = [speedrun.plain_gpt.rate_at(recipe, step, 2000) for step in range(2001)]
    assert max(rates) == rates[100] == recipe.rate
    assert rates[-1] == pytest.approx(recipe.lowest_rate)


TINY = (
    "--override=--model={d_model: 32, n_layers: 1, n_heads: 2}",
    "--override=--data_loader.global_batch_size=512",
    "--override=--train_module.rank_microbatch_size=256",
)


@pytest.mark.slow
def test_each_contestant_trains_for_its_time_and_is_measured_on_the_same_documents(
    speedrun: Any, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speedrun.main(["--seconds", "1", "--data", str(data), "--cores", "1", "--json", *TINY])
    printed = capsys.readouterr()
    found = {each["name"]: each for each in map(json.loads, printed.out.splitlines())}
    assert set(found) == {"ours", "nanoGPT", "transformers"}, printed.err
    for each in found.values():
        assert set(each["bits"]) == {"code", "docs"}
        assert all(0 < bits < 20 for bits in each["bits"].values())
        assert each["step"] >= 2
        assert each["tokens"] % each["step"] == 0
        assert each["seconds"] > 0


@pytest.mark.slow
def test_the_form_for_a_gpu_measures_loss_against_time(
    speedrun: Any, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = replace(
        speedrun.plain_gpt.GPU, layers=1, heads=2, width=32, length=32, rows=2, micro_batches=2
    )
    monkeypatch.setattr(speedrun.plain_gpt, "GPU", tiny)
    monkeypatch.setattr(speedrun, "GPU_LENGTH", 32)
    options = ["--gpu", "--tokens", str(data / "tokens/code"), "--points", "2", "--cores", "1"]
    options += ["--only", "ours", "nanoGPT", "--seconds", "1", "--json"]
    speedrun.main([*options, *TINY])
    points = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [each["name"] for each in points] == ["ours", "ours", "nanoGPT", "nanoGPT"]
    for first, last in (points[:2], points[2:]):
        assert first["step"] < last["step"]
        assert 0 < first["seconds"] < last["seconds"]
        assert set(last["bits"]) == {"text"}
