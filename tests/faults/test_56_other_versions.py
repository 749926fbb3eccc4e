"""Row 56: a checkpoint of an older format is read, one of a newer format refused with numbers."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from support.runs import build_trainer, metrics

from olm_data.canonical import digest
from olm_data.errors import ValidationError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import VERSION
from olm_train.checkpoint.weights import model_config
from olm_train.train_module import TransformerTrainModuleConfig
from olm_train.world import World

VERSION_1 = "tests/olm_train/checkpoint/version-1/step00000002"
"""Written by the first program that wrote checkpoints; its config.json lacks what came later."""
DIGESTS = {
    "model": "2c6a93b5a30501a5e1380ec2f5bf38230cd200665ab6d8a4551c458298fd088a",
    "optim": "157358855a4f73732ecea65630e070539e573f990fd01a9187a3c7fa7816bab6",
}


def test_56_a_stored_checkpoint_of_version_1_gives_every_bit_it_held(repository: Path) -> None:
    checkpoint = open_checkpoint(repository / VERSION_1, World())
    assert (checkpoint.manifest.version, checkpoint.step, checkpoint.state()["step"]) == (1, 2, 2)
    config = TransformerTrainModuleConfig(rank_microbatch_size=16)
    module = config.build(model_config(checkpoint), seed=8)
    tensors = module.state_dict()
    checkpoint.load_tensors(tensors, World())
    for part, expected in DIGESTS.items():
        sha = hashlib.sha256()
        for name, tensor in sorted(tensors[part].items()):
            sha.update(name.encode() + tensor.numpy().tobytes())
        assert sha.hexdigest() == expected, part


def rewrite(folder: Path, version: int, *, without: str | None = None) -> None:
    """Make the manifest one of `version`, and the configuration one that lacks a field."""
    value = json.loads((folder / "manifest.json").read_bytes())
    del value["digest"]
    value["version"] = version
    if without is not None:
        config = json.loads((folder / "config.json").read_bytes())
        del config["model"][without]
        data = json.dumps(config).encode()
        (folder / "config.json").write_bytes(data)
        entry = next(entry for entry in value["files"] if entry["name"] == "config.json")
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    value["digest"] = digest(value)
    (folder / "manifest.json").write_text(json.dumps(value, indent=1) + "\n")


@pytest.fixture(scope="module")
def saved(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped at step 2."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    go_on(tiny_mixture, folder, 2)
    return folder


def go_on(lock: Path, folder: Path, stop: int) -> None:
    stop_at = f"--trainer.hard_stop={{value: {stop}, unit: steps}}"
    build_trainer(lock, folder, "--trainer.callbacks.lm_evaluator.enabled=false", stop_at).fit()


def test_56_a_run_saved_by_version_1_goes_on_as_if_nothing_had_changed(
    saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    old = shutil.copytree(saved, tmp_path / "old")
    rewrite(old / "step00000002", 1, without="norm_eps")
    go_on(tiny_mixture, old, 4)
    go_on(tiny_mixture, shutil.copytree(saved, tmp_path / "new"), 4)
    assert metrics(old) == metrics(tmp_path / "new")


def test_56_a_newer_version_is_refused_with_the_numbers_and_left_alone(
    saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    rewrite(folder / "step00000002", VERSION + 7)
    before = {path: path.read_bytes() for path in (folder / "step00000002").rglob("*.*")}
    with pytest.raises(ValidationError) as caught:
        go_on(tiny_mixture, folder, 4)
    assert f"version {VERSION + 7}; this program reads" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
