"""Row 56: a checkpoint of another format is refused; what an old one lacks has its default."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.runs import build_trainer, stop
from support.seal import seal

from olm_data.errors import ValidationError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import VERSION
from olm_train.checkpoint.portable import model_config
from olm_train.distributed.world import World


@pytest.fixture(scope="module")
def saved(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped at step 2."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    go_on(tiny_mixture, folder, 2)
    return folder


def go_on(lock: Path, folder: Path, step: int) -> None:
    quiet = "--trainer.callbacks.lm_evaluator.enabled=false"
    build_trainer(lock, folder, quiet, stop(step)).fit()


def test_56_what_a_later_program_knows_of_a_model_has_its_default_where_an_old_config_lacks_it(
    saved: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved / "step00000002", tmp_path / "step00000002")
    config = json.loads((folder / "config.json").read_bytes())
    del config["model"]["norm"]["eps"]
    (folder / "config.json").write_text(json.dumps(config))
    seal(folder)
    assert model_config(open_checkpoint(folder, World())).norm.eps == 1e-6


@pytest.mark.parametrize("version", [1, 2, VERSION + 7])
def test_56_another_version_is_refused_with_the_numbers_and_left_alone(
    version: int, saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    seal(folder / "step00000002", version=version)
    before = {path: path.read_bytes() for path in (folder / "step00000002").rglob("*.*")}
    with pytest.raises(ValidationError) as caught:
        go_on(tiny_mixture, folder, 4)
    assert f"version {version}; this program reads" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
