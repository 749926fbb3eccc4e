"""A model is opened by the place and name it is given, and needs its lock."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.old_checkpoints import seal
from support.runs import build_trainer

from olm_data.errors import InputError, ValidationError
from olm_train.checkpoint.portable import open_portable


def quiet(error: object) -> None:
    raise AssertionError(error)


@pytest.fixture(scope="module")
def run(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("portable") / "run"
    build_trainer(
        tiny_mixture,
        folder,
        "--trainer.callbacks.lm_evaluator.enabled=false",
        "--trainer.callbacks.checkpointer.save_interval=1",
        "--trainer.hard_stop={value: 2, unit: steps}",
    ).fit()
    return folder


@pytest.mark.parametrize(
    ("place", "name", "step"),
    [
        ("", "latest", 2),
        ("", "1", 1),
        ("", "step00000001", 1),
        ("step00000001", "latest", 1),
    ],
)
def test_a_step_a_name_or_the_newest(run: Path, place: str, name: str, step: int) -> None:
    found = open_portable(run / place, name, quiet)
    assert (found.step, found.name) == (step, f"step{step:08d}")
    assert found.model().config.vocab_size >= found.lock.tokenizer.vocab_size


@pytest.mark.parametrize("name", ["7", "step00000007", "newest"])
def test_a_name_without_a_checkpoint_is_refused(run: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"no checkpoint {name}"):
        open_portable(run, name, quiet)


def test_a_damaged_newer_one_is_told_and_passed_over(run: Path, tmp_path: Path) -> None:
    copy, told = shutil.copytree(run, tmp_path / "run"), list[str]()
    (copy / "step00000002/config.json").write_text("{}")
    assert open_portable(copy, "latest", lambda error: told.append(error.what)).step == 1
    assert ["step00000002 is damaged" in what for what in told] == [True]
    with pytest.raises(ValidationError, match=r"config\.json has 2 bytes instead of"):
        open_portable(copy, "2", quiet)


def test_a_checkpoint_without_a_lock_or_a_tokenizer_says_so(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run / "step00000002", tmp_path / "step00000002")
    (folder / "tokenizer.json").unlink()
    seal(folder)
    with pytest.raises(InputError, match="no tokenizer with this model"):
        open_portable(folder, "latest", quiet).tokenizer()
    (folder / "mixture.lock.json").unlink()
    seal(folder)
    with pytest.raises(InputError, match=r"no mixture\.lock\.json with this model"):
        open_portable(folder, "latest", quiet)
