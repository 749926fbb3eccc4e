"""Each folder of pipelines/ is complete, and what it configures is accepted."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml
from support.small_datasets import write_sparse_dataset
from support.typed import mistakes
from tokenizers import Tokenizer

from olm_data.mixture.mix import mix
from olm_train.run.command import main

PIPELINES = Path(__file__).parents[1] / "pipelines"
RECIPES = {
    "gpt2-124m": 50_257,
    "olmo2-1b": 100_278,
    "olmo3-7b": 100_278,
    "olmoe": 50_280,
    "qwen3-0.6b-continue": 151_669,
    "smollm2-135m": 49_152,
    "speedrun": 32_768,
}
"""Of published runs; with the vocabulary that their costs are counted for."""
FOLDERS = sorted({path.name for path in PIPELINES.iterdir() if path.is_dir()} - set(RECIPES))
STAGES = [
    pytest.param(path, id=f"{name}-{path.stem}", marks=[pytest.mark.slow] * name.startswith("olmo"))
    for name in RECIPES
    for path in sorted((PIPELINES / name).glob("train*.yaml"))
]
UNITS = {"B": 10**9, "T": 10**12}
NOTHING = r"exports as nothing that transformers knows: .*\n +llama: attention\.shift_keys is true"
EXPORTS = dict.fromkeys(("quickstart", "midtrain", "long-context", "sft"), NOTHING)
"""What the dry run says of a model; of others, that other programs can read what is trained."""
WHOLE = {"README.md", "mix.yaml", "train.yaml"}


@pytest.mark.parametrize("name", [*FOLDERS, *RECIPES])
def test_a_folder_has_its_files_and_its_readme_names_each(name: str) -> None:
    files = {path.name for path in (PIPELINES / name).iterdir() if path.is_file()}
    assert files >= WHOLE
    named = set(re.findall(r"^\| `([^`]+)` \|", (PIPELINES / name / "README.md").read_text(), re.M))
    assert named >= files - {"README.md"}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_mixture_compiles_and_the_configuration_fits_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    text = (PIPELINES / name / "mix.yaml").read_text()
    (folder / "mix.yaml").write_text(re.sub(r", where: [^,}]+", "", text))  # sparse: no documents
    shards, tokens = (200, 100_000_000) if name == "slurm" else (1, 2_000_000)
    for place in {*re.findall(r"data: ([^,}]+)", text)}:
        write_sparse_dataset(folder / place, shards=shards, tokens=tokens, documents=10)
    lock = str(folder / "mix.lock.json")
    mix(str(folder / "mix.yaml"), lock)
    assert main([
        str(PIPELINES / name / "train.yaml"), "--dry-run", f"--data_loader.mixture={lock}",
        f"--trainer.save_folder={folder / 'run'}", "--trainer.callbacks.lm_evaluator=null",
        "--trainer.callbacks.downstream_evaluator=null",
        "--trainer.load_path=null", "--trainer.load_trainer_state=true",
        "--trainer.load_optim_state=true",
    ]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "steps of" in said
    assert re.search(EXPORTS.get(name, r"exports as: \w+ForCausalLM"), said)


@pytest.mark.parametrize("train", STAGES)
def test_a_recipe_is_accepted_fits_its_gpus_and_costs_what_its_readme_says(
    train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = train.with_name(train.name.replace("train", "mix")).read_text()
    (tmp_path / "mix.yaml").write_text(manifest)
    mixture, vocab_size = yaml.safe_load(manifest), RECIPES[train.parent.name]
    (stage,) = mixture["stages"]
    tokens = int(float(stage["tokens"][:-1]) * UNITS[stage["tokens"][-1]])
    for source in mixture["sources"].values():
        write_sparse_dataset(
            tmp_path / source["data"],
            shards=200,
            tokens=tokens // 200 + 1,
            documents=10,
            dtype="uint32" if vocab_size > 65_536 else "uint16",
            vocab_size=vocab_size,
        )
    lock = str(tmp_path / "mix.lock.json")
    mix(str(tmp_path / "mix.yaml"), lock)
    readme = (train.parent / "README.md").read_text()
    row = re.search(rf"^\| `{train.name}` \| (\d+) \| ([\d,.]+) \| \$([\d,]+) \|$", readme, re.M)
    assert row is not None
    gpus, hours, dollars = (float(cell.replace(",", "")) for cell in row.groups())
    monkeypatch.setenv("WORLD_SIZE", f"{gpus:.0f}")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert main([
        str(train), "--dry-run", f"--data_loader.mixture={lock}",
        f"--trainer.save_folder={tmp_path / 'run'}", "--trainer.callbacks.lm_evaluator=null",
        "--trainer.load_path=null", "--trainer.load_trainer_state=true",
        "--trainer.load_optim_state=true",
    ]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "exports as: " in said
    assert not re.search("^ *too much: ", said, re.M)
    flops = re.search(r"([\d.e+]+) in all", said)
    assert flops is not None
    assert hours == pytest.approx(float(flops[1]) / (0.4 * 989e12) / 3600, rel=0.01)
    assert dollars == pytest.approx(3.99 * hours, rel=0.01, abs=1)


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_recipe_parse(name: str) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (PIPELINES / name / "README.md").read_text(), re.S)
    assert mistakes(block) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_small(name: str, tmp_path: Path) -> None:
    assert runpy.run_path(str(PIPELINES / "twin.py"))["main"](name, tmp_path / "twin") == 0
    runs = sorted((tmp_path / "twin" / "runs").iterdir())
    assert len(runs) == len(list((PIPELINES / name).glob("train*.yaml")))
    for run in runs:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [line["train/CE loss"] for line in lines if "train/CE loss" in line]
        assert losses[-1] < losses[0]


def test_a_needle_stands_before_its_question(tiny_tokenizer: Path, tmp_path: Path) -> None:
    needle = runpy.run_path(str(PIPELINES / "long-context" / "needle.py"))
    needle["main"](str(tiny_tokenizer), 300, tmp_path / "needle.jsonl")
    questions = [json.loads(line) for line in (tmp_path / "needle.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer))
    assert len(questions) == needle["QUESTIONS"]
    for each in questions:
        ask = each["context"].splitlines()[-1]
        assert ask + each["choices"][each["gold"]] + "." in each["context"].splitlines()
        assert all(each["context"].count(f"is{choice}.") == 1 for choice in each["choices"])
        assert 200 < len(tokenizer.encode(each["context"], add_special_tokens=False).ids) <= 300
    assert len({each["gold"] for each in questions}) == 4
