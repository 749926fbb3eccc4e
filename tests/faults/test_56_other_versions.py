"""Row 56: an old checkpoint is converted on trust alone, one of a newer format refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.old_checkpoints import as_version_2, seal
from support.runs import build_trainer, metrics

from olm_data.errors import InputError, ValidationError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import VERSION
from olm_train.checkpoint.weights import model_config
from olm_train.convert_checkpoint import main as convert
from olm_train.distributed.world import World
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig

VERSION_1 = "tests/olm_train/checkpoint/version-1/step00000002"
"""Written by the first program that wrote checkpoints; its config.json lacks what came later."""
DIGESTS = {
    "model": "2c6a93b5a30501a5e1380ec2f5bf38230cd200665ab6d8a4551c458298fd088a",
    "optim": "157358855a4f73732ecea65630e070539e573f990fd01a9187a3c7fa7816bab6",
}


def test_56_a_stored_checkpoint_of_version_1_is_refused_and_converted_gives_every_bit_it_held(
    repository: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="version 1, which holds pickles") as refused:
        open_checkpoint(repository / VERSION_1, World())
    assert "olm-train convert-checkpoint" in str(refused.value.fix)
    result = CliRunner().invoke(convert, [str(repository / VERSION_1), str(tmp_path / "new")])
    assert (result.exit_code, list(tmp_path.iterdir())) == (4, [])
    assert "--trust" in result.output
    arguments = [str(repository / VERSION_1), str(tmp_path / "new"), "--trust"]
    result = CliRunner().invoke(convert, arguments)
    assert result.exit_code == 0, result.output
    checkpoint = open_checkpoint(tmp_path / "new" / "step00000002", World())
    assert (checkpoint.manifest.version, checkpoint.step) == (VERSION, 2)
    config = TransformerTrainModuleConfig(rank_microbatch_size=16)
    module = TransformerTrainModule(config, model_config(checkpoint), seed=8)
    tensors = module.state_dict()
    checkpoint.load_tensors(tensors, World())
    for part, expected in DIGESTS.items():
        sha = hashlib.sha256()
        for name, tensor in sorted(tensors[part].items()):
            sha.update(name.encode() + tensor.numpy().tobytes())
        assert sha.hexdigest() == expected, part


@pytest.fixture(scope="module")
def saved(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped at step 2."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    go_on(tiny_mixture, folder, 2)
    return folder


def go_on(lock: Path, folder: Path, stop: int) -> None:
    stop_at = f"--trainer.hard_stop={{value: {stop}, unit: steps}}"
    build_trainer(lock, folder, "--trainer.callbacks.lm_evaluator.enabled=false", stop_at).fit()


def test_56_a_run_saved_by_version_2_goes_on_converted_as_if_nothing_had_changed(
    saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    old, new = shutil.copytree(saved, tmp_path / "old"), tmp_path / "converted"
    state = build_trainer(tiny_mixture, tmp_path / "none").train_module.state_dict()
    open_checkpoint(old / "step00000002", World()).load_tensors(state, World())
    as_version_2(old / "step00000002", state, tiny_mixture.parent)
    with pytest.raises(InputError, match="version 2, which holds pickles"):
        go_on(tiny_mixture, old, 4)
    result = CliRunner().invoke(convert, [str(old), str(new), "--trust"])
    assert result.exit_code == 0, result.output
    go_on(tiny_mixture, new, 4)
    go_on(tiny_mixture, saved := shutil.copytree(saved, tmp_path / "new"), 4)
    assert metrics(new) == metrics(saved)
    assert CliRunner().invoke(convert, [str(old), str(new), "--trust"]).exit_code == 7
    again = CliRunner().invoke(convert, [str(new), str(tmp_path / "x"), "--trust"])
    assert (again.exit_code, "nothing to convert" in again.output) == (4, True)


def test_56_what_a_later_program_knows_of_a_model_has_its_default_where_an_old_config_lacks_it(
    saved: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved / "step00000002", tmp_path / "step00000002")
    config = json.loads((folder / "config.json").read_bytes())
    del config["model"]["norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    seal(folder)
    assert model_config(open_checkpoint(folder, World())).norm_eps == 1e-6


def test_56_a_newer_version_is_refused_with_the_numbers_and_left_alone(
    saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    seal(folder / "step00000002", version=VERSION + 7)
    before = {path: path.read_bytes() for path in (folder / "step00000002").rglob("*.*")}
    with pytest.raises(ValidationError) as caught:
        go_on(tiny_mixture, folder, 4)
    assert f"version {VERSION + 7}; this program reads" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before


def test_56_s1_plain_values_of_an_old_checkpoint_come_along(
    saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    old = shutil.copytree(saved, tmp_path / "old") / "step00000002"
    state = {"model": {"w": torch.ones(3, 2)}, "optim": {"w.step": 3, "w.note": "text", "lr": 0.5}}
    as_version_2(old, state, tiny_mixture.parent)
    result = CliRunner().invoke(convert, [str(old), str(tmp_path / "new"), "--trust"])
    assert result.exit_code == 0, result.output
    new = open_checkpoint(tmp_path / "new/step00000002", World())
    assert new.index.values == {"optim.w.step": 3, "optim.w.note": "text", "optim.lr": 0.5}
    assert new.index.tensors["model.w"].shape == (3, 2)
