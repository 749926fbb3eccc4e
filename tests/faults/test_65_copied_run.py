"""Row 65, audit row U4: a copied run or export is whole: it needs no data and no path of old."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.runs import build_trainer, make_mixture

from olm_train.checkpoint.manifest import CONFIG, LOCK, STATE, TOKENIZER
from olm_train.extensions.downstream.command import main as evaluate
from olm_train.extensions.generate.command import main as generate
from olm_train.extensions.hf_export.command import main as export

pytestmark = pytest.mark.xdist_group("moved-runs")  # its fixture is made once


@pytest.fixture(scope="module")
def moved(tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copied run and a held-out set; all that was used to train is deleted."""
    there, here = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("here")
    (there / "data").mkdir()
    lock = make_mixture(there / "data", tiny_tokenizer)
    build_trainer(
        lock, there / "run", "--trainer.hard_stop={value: 3, unit: steps}",
        "--trainer.callbacks.lm_evaluator.eval_interval=100",
    ).fit()  # fmt: skip
    shutil.copytree(there / "run", here / "run")
    shutil.copytree(there / "data" / "held", here / "held")
    shutil.rmtree(there)
    (here / "there").write_text(str(there))
    return here


def run(command: object, *arguments: object) -> str:
    result = CliRunner().invoke(command, [str(item) for item in arguments])  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result.stdout


def test_65_u4_a_checkpoint_holds_its_tokenizer_lock_and_configuration(moved: Path) -> None:
    names = {path.name for path in (moved / "run" / "step00000003").iterdir()}
    assert {TOKENIZER, LOCK, CONFIG, STATE} <= names


def test_65_u4_text_is_made_from_a_copied_run_and_from_an_export_of_it(
    moved: Path, tmp_path: Path
) -> None:
    run(export, moved / "run", "--output", tmp_path / "out")
    exported = shutil.copytree(tmp_path / "out", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "out")
    options = ("--prompt", "the quick", "--max-new-tokens", 8, "--temperature", 0)
    texts = {
        run(generate, place, *options)
        for place in (moved / "run", moved / "run" / "step00000003", exported)
    }
    assert len(texts) == 1
    assert texts.pop().startswith("the quick")


def test_65_u4_evaluation_of_a_copy_and_of_an_export_gives_the_loss_that_the_run_logged(
    moved: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in (moved / "run" / "metrics.jsonl").open()]
    (logged,) = [line["eval"]["held"] for line in lines if "eval" in line]
    run(export, moved / "run", "--output", tmp_path)
    for place in (moved / "run", tmp_path / "model.safetensors"):
        result = json.loads(run(evaluate, place, "--data", moved / "held", "--json"))
        (found,) = result["datasets"].values()
        assert result["step"] == 3
        assert found["tokens"] == logged["tokens"]
        assert found["CE loss"] == pytest.approx(logged["CE loss"], rel=1e-6)
    assert "nats a token" in run(evaluate, moved / "run", "--data", moved / "held")


def test_65_u4_no_file_of_a_checkpoint_or_an_export_names_the_place_where_it_was_written(
    moved: Path, tmp_path: Path
) -> None:
    run(export, moved / "run", "--output", tmp_path / "out")
    there = (moved / "there").read_bytes()
    for folder in (moved / "run" / "step00000003", tmp_path / "out"):
        assert not [path for path in folder.rglob("*.*") if there in path.read_bytes()]


def test_65_u4_an_export_has_no_other_checkpoint(moved: Path, tmp_path: Path) -> None:
    run(export, moved / "run", "--output", tmp_path)
    result = CliRunner().invoke(generate, [str(tmp_path), "--checkpoint", "2"])
    assert (result.exit_code, "no checkpoint 2" in result.output) == (2, True)
