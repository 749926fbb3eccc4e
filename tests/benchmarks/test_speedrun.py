"""`benchmarks/speedrun.py`: what it counts is exact, and each contestant trains, at tiny sizes."""

from __future__ import annotations

import hashlib
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
def speedrun(imported: Any) -> Any:
    """The benchmark as a module."""
    return imported("speedrun")


@pytest.fixture
def tiny_recipes(speedrun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain GPTs as small as `TINY` makes ours: a step takes milliseconds on any CPU."""
    small = {"layers": 1, "heads": 2, "width": 32, "length": 32, "rows": 2}
    for name, more in (("CPU", {}), ("MUON", {}), ("GPU", {"micro_batches": 2})):
        recipe = getattr(speedrun.plain_gpt, name)
        monkeypatch.setattr(speedrun.plain_gpt, name, replace(recipe, **small, **more))


@pytest.fixture
def text(speedrun: Any) -> Any:
    """What the contestants read, as a module."""
    return importlib.import_module("speedruns.text")


def texts(subset: str) -> dict[str, str]:
    """Short texts with letters beyond ASCII, each of words of its own."""
    words = [hashlib.sha256(f"{subset} {n}".encode()).hexdigest() for n in range(80)]
    return {
        f"{n}.txt": f"naïve “{word[:9]}” {word[9:30]}, {word[30:]}" for n, word in enumerate(words)
    }


@pytest.fixture
def data(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    """A folder as `quickstart_sources` makes it, of short texts."""
    folder = tmp_path / "out" / "vocabulary-4096"
    for name in ("code", "docs"):
        records = [{"text": text} for text in texts(name).values()]
        for part, of in {
            "train": records[:60],
            "select": records[60:70],
            "report": records[70:],
        }.items():
            path = tmp_path / "text.jsonl"
            path.write_text("\n".join(map(json.dumps, of)))
            olm_data.tokenize(
                path, tokenizer=tiny_tokenizer, output=folder / part / name, workers=1
            )
    return tmp_path / "out"


def test_the_sources_are_the_quickstarts_and_characters_are_the_text_that_was_tokenised(
    speedrun: Any, data: Path
) -> None:
    code, docs = speedrun.quickstart_sources(data, "report")
    assert [(code.name, code.share), (docs.name, docs.share)] == [("code", 0.8), ("docs", 0.2)]
    assert code.held_out_texts == list(texts("code").values())[70:]
    assert code.held_out_texts != speedrun.quickstart_sources(data, "select")[0].held_out_texts
    assert code.sizes.tolist() == [len(text.encode()) for text in code.held_out_texts]
    ids = code.held_out_tokens[0]
    assert ids[0] == ids[-1] == Dataset.open(str(code.held_out)).eos
    plain = speedrun.plain_gpt.Text(speedrun.plain_gpt.CPU, [code, docs])
    every = code.text + docs.text + "".join(code.held_out_texts + docs.held_out_texts) + "\n"
    points = np.unique([*map(ord, every)])
    assert plain.vocabulary == len(points)
    # the first character is predicted too, after a line's end
    assert "".join(chr(points[n]) for n in plain.held_out[0][0]) == "\n" + code.held_out_texts[0]


def test_files_are_held_out_by_their_text_and_no_near_copy_of_another_is_measured(
    text: Any,
) -> None:
    random = np.random.default_rng(7)
    files = {
        f"{n}.py": " ".join(f"w{word}" for word in random.integers(10_000, size=200))
        for n in range(800)
    }
    train, halves, copies = text.split(files)
    select, report = halves["select"], halves["report"]
    assert copies == 0
    assert not set(select) & set(report)
    assert not (set(select) | set(report)) & set(train)
    assert len(train) + len(select) + len(report) == len(files)
    assert 20 < len(select) < 60
    assert 20 < len(report) < 60
    # another name and another order change nothing; a text of which most is learnt is left out
    renamed = {f"b/{path}": files[path] for path in sorted(files)}
    assert set(text.split(renamed)[1]["report"].values()) == set(report.values())
    first = next(iter(report))
    learnt = " ".join(report[first].split()[:150])
    with_copy = next(
        {**files, "copy.py": candidate}
        for candidate in (f"{learnt} tail{n}" for n in range(100))
        if "copy.py" in text.split({"copy.py": candidate})[0]
    )
    assert first not in text.split(with_copy)[1]["report"]
    assert text.split(with_copy)[2] == 1


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary_for_every_label(text: Any) -> None:
    documents = [np.arange(n) % 8 for n in (1, 2, 9, 23)]
    lengths = []

    def uniform(ids: torch.Tensor) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return torch.zeros(*ids.shape, 8)

    found = text.measure(uniform, documents, np.full(4, 25.0), 4)
    assert found.bits == pytest.approx([3 * (len(document) - 1) for document in documents])
    assert found.per_byte == pytest.approx(3 * 31 / 100)
    assert max(lengths) == 4


def test_the_error_is_that_of_a_mean_where_documents_are_of_one_size_and_pairs_are_compared(
    text: Any,
) -> None:
    random = np.random.default_rng(3)
    bits, sizes = random.normal(200, 20, size=40), np.full(40, 100.0)
    found = text.Measured(bits, sizes)
    assert found.error == pytest.approx(np.std(bits / 100, ddof=1) / np.sqrt(40))
    better = text.Measured(bits - 10, sizes)
    assert found.less(better).per_byte == pytest.approx(0.1)
    assert found.less(better).error == pytest.approx(0, abs=1e-9)
    assert np.isnan(text.Measured(bits[:1], sizes[:1]).error)


@pytest.mark.parametrize("runs", [1, 3, 8])
def test_a_search_takes_its_runs_and_finds_a_better_rate_and_warm_up(
    speedrun: Any, runs: int
) -> None:
    tried = []

    def run(tuning: Any) -> float:
        tried.append(tuning)
        return float(np.log(tuning.rate / 4e-3) ** 2 + np.log(tuning.warmup / 0.2) ** 2 / 4)

    start = importlib.import_module("speedruns.budget").Tuning(5e-4, 0.1)
    found = speedrun.tune(run, start, runs)
    assert list(found) == tried
    assert len(set(tried)) == runs
    assert tried[0] == start
    best = min(found, key=found.__getitem__)
    if runs == 8:
        assert best.rate == pytest.approx(4.5e-3)
        assert best.warmup == pytest.approx(0.2)


def test_windows_follow_the_shares_and_labels_are_the_next_ids(text: Any) -> None:
    streams = [np.arange(1000), 5000 + np.arange(50)]
    inputs, labels = text.Windows(streams, [0.8, 0.2], 8, seed=1).draw(2000)
    assert torch.equal(labels, inputs + 1)
    assert float((inputs[:, 0] >= 5000).float().mean()) == pytest.approx(0.2, abs=0.04)


def test_steps_fit_the_budget_and_the_schedule_ends_with_them(speedrun: Any) -> None:
    budget = importlib.import_module("speedruns.budget")
    wall = budget.Budget(seconds=10, cores=2)
    assert wall.steps([9.0, 9.0, 9.0, 0.5, 0.5, 4.0]) == 20
    assert replace(wall, processors=True).steps([9.0, 9.0, 9.0, 0.5, 0.5, 0.5]) == 40
    fixed = replace(wall, fixed_steps=7)
    assert fixed.calibrate(pytest.fail) == fixed.steps([1.0] * 9) == 7
    assert budget.evaluated_steps(10, 1) == {10}
    assert budget.evaluated_steps(10, 4) == {2, 5, 8, 10}
    recipe = speedrun.plain_gpt.CPU
    rates = [
        speedrun.plain_gpt.rate_at(recipe, recipe.published, step, 2000) for step in range(2001)
    ]
    assert max(rates) == rates[100] == recipe.published.rate
    assert rates[-1] == pytest.approx(recipe.published.rate / 10)


TINY = (
    "--override=--model={d_model: 32, n_layers: 1, n_heads: 2}",
    "--override=--data_loader.global_batch_size=512",
    "--override=--train_module.rank_microbatch_size=256",
)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_recipes")
def test_each_contestant_trains_for_its_time_and_is_measured_on_the_same_documents(
    speedrun: Any, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speedrun.main(["--seconds", "1", "--data", str(data), "--cores", "1", "--json", *TINY])
    printed = capsys.readouterr()
    found = {each["name"]: each for each in map(json.loads, printed.out.splitlines())}
    assert set(found) == {"ours", "nanoGPT", "transformers", "plain-muon"}, printed.err
    for each in found.values():
        assert set(each["bits"]) == set(each["errors"]) == {"code", "docs"}
        assert all(0 < bits < 20 for bits in each["bits"].values())
        assert all(0 < error < 10 for error in each["errors"].values())
        assert each["step"] >= 2
        assert each["tokens"] % each["step"] == 0
        assert each["seconds"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_recipes")
def test_runs_of_a_search_have_as_many_steps_and_other_rates(
    speedrun: Any, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--seconds", "1", "--data", str(data), "--cores", "1", "--json", "--tune", "2"]
    speedrun.main([*options, "--only", "ours", "plain-muon", *TINY])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for name in ("ours", "plain-muon"):
        first, second = (each for each in found if each["name"] == name)
        assert first["step"] == second["step"]
        assert second["rate"] == pytest.approx(3 * first["rate"], rel=0.1)
        assert first["bits"] != second["bits"]


def test_what_is_tuned_on_the_reported_half_is_refused(
    speedrun: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        speedrun.arguments(["--tune", "3", "--half", "report"])
    assert "cannot be reported" in capsys.readouterr().err
    assert speedrun.arguments(["--tune", "3"]).half == "select"
    assert speedrun.arguments([]).half == "report"


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_recipes")
def test_the_form_for_a_gpu_measures_loss_against_time(
    speedrun: Any, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speedrun, "GPU_LENGTH", 32)
    tokens = data / "vocabulary-4096/train/code"
    (tokens / "validation").symlink_to(data / "vocabulary-4096/report/code")
    options = ["--gpu", "--tokens", str(tokens), "--points", "2", "--cores", "1"]
    options += ["--only", "ours", "nanoGPT", "--seconds", "1", "--json"]
    speedrun.main([*options, *TINY])
    points = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [each["name"] for each in points] == ["ours", "ours", "nanoGPT", "nanoGPT"]
    for first, last in (points[:2], points[2:]):
        assert first["step"] < last["step"]
        assert 0 < first["seconds"] < last["seconds"]
        assert set(last["bits"]) == {"text"}
