"""Each folder of pipelines/ is complete, and what it configures is accepted."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from support.small_datasets import write_sparse_dataset
from tokenizers import Tokenizer

from olm_data.mixture.mix import mix
from olm_train.run.command import main

PIPELINES = Path(__file__).parents[1] / "pipelines"
FOLDERS = sorted(path.name for path in PIPELINES.iterdir() if path.is_dir())
NOTHING = r"exports as nothing that transformers knows: .*\n +llama: attention\.shift_keys is true"
EXPORTS = dict.fromkeys(("quickstart", "midtrain", "long-context", "sft"), NOTHING)
"""What the dry run says of a model; of others, that other programs can read what is trained."""
WHOLE = {"README.md", "mix.yaml", "train.yaml"}


@pytest.mark.parametrize("name", FOLDERS)
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
