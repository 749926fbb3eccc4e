"""Each folder of pipelines/ is complete, and what it configures is accepted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.small_datasets import write_sparse_dataset

from olm_data.mixture.mix import mix
from olm_train.run.command import main

PIPELINES = Path(__file__).parents[1] / "pipelines"
FOLDERS = sorted(path.name for path in PIPELINES.iterdir() if path.is_dir())
NOTHING = r"exports as nothing that transformers knows: .*\n +llama: attention\.shift_keys is true"
EXPORTS = {"quickstart": NOTHING, "sft": NOTHING}
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
    shutil.copy(PIPELINES / name / "mix.yaml", tmp_path)
    text = (tmp_path / "mix.yaml").read_text()
    for place in re.findall(r"data: ([^,}]+)", text):
        write_sparse_dataset(tmp_path / place, shards=200, tokens=100_000_000, documents=10)
    lock = str(tmp_path / "mix.lock.json")
    mix(str(tmp_path / "mix.yaml"), lock)
    assert main([
        str(PIPELINES / name / "train.yaml"), "--dry-run", f"--data_loader.mixture={lock}",
        f"--trainer.save_folder={tmp_path / 'run'}", "--trainer.callbacks.lm_evaluator=null",
        "--trainer.load_path=null", "--trainer.load_trainer_state=true",
        "--trainer.load_optim_state=true",
    ]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "steps of" in said
    assert re.search(EXPORTS.get(name, r"exports as: \w+ForCausalLM"), said)
