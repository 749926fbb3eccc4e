"""Weights of a model: exported without pads, and read back only as they were exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.runs import build_trainer

from olm_data.errors import InputError, OlmError, ValidationError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.command import main
from olm_train.model.weights_folder import load_exported

MODEL = (
    "--model={d_model: 16, n_layers: 2, n_heads: 2, vocab_multiple: 100, "
    "feed_forward: {hidden_size: 32}}"
)


@pytest.fixture(scope="module")
def first(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, its vocabulary padded from 512 to 600."""
    folder = tmp_path_factory.mktemp("first") / "run"
    build_trainer(tiny_mixture, folder, MODEL, stop=1, quiet=True).fit()
    return folder


@pytest.fixture(scope="module")
def exported(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("exported") / "weights" / "model.safetensors"
    result = CliRunner().invoke(main, [str(first), "--output", str(file)])
    assert result.exit_code == 0, result.output
    assert "step         1\n" in result.output
    return file


def test_the_exported_file_holds_the_model_without_its_pads(first: Path, exported: Path) -> None:
    whole = load_file(exported)
    model = evaluation_model(open_checkpoint(first / "step00000001", World()))
    about = json.loads((exported.parent / "config.json").read_text())
    assert about["model"]["vocab_size"] == 512
    assert about["parameters"] == sum(value.numel() for value in whole.values())
    for name, value in model.named_parameters():
        rows = 512 if value.shape[0] == 600 else value.shape[0]
        assert torch.equal(whole[name], value[:rows])
        assert not value[rows:].any()  # nothing is lost


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def version(file: Path) -> None:
    path = file.parent / "config.json"
    path.write_text(path.read_text().replace('"version": 3', '"version": 9'))


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (flip, ValidationError, "sha256 differs"),
        (version, ValidationError, "version 9; this program reads olm-model versions 1, 2, 3"),
        (Path.unlink, InputError, "no exported weights"),
    ],
)
def test_damaged_exports_are_refused(
    exported: Path, tmp_path: Path, damage: object, error: type[OlmError], says: str
) -> None:
    file = shutil.copytree(exported.parent, tmp_path / "copy") / exported.name
    damage(file)  # type: ignore[operator]
    with pytest.raises(error, match=says):
        load_exported(str(file))
